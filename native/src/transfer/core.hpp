// The mover: ties board, arbiters, watchers and backend together. Every method is thread-safe.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "transfer/arbiter.hpp"
#include "transfer/watchers.hpp"

namespace forebay {

// What a wait found; `id` is the transfer that stood in its way.
struct WaitResult {
  WaitVerdict verdict;
  std::int64_t id;
};

class Core {
 public:
  // Throws SettingsError. The pools' memory must outlive close().
  Core(const Settings& settings, PoolLayout device, PoolLayout host,
       std::unique_ptr<Backend> backend,
       std::unique_ptr<OrderingRules> rules = std::make_unique<OrderingRules>());
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // All or none; throws ProtocolError.
  void submit(std::vector<std::shared_ptr<Transfer>> transfers);
  void cancel(std::span<const std::int64_t> ids);
  void expedite(std::span<const std::int64_t> ids, TransferClass transfer_class, double deadline_s);
  // What is left of these loads goes band by band: band b ends at byte ends[b] of every block.
  void use_bands(std::span<const std::int64_t> ids, const std::vector<std::int64_t>& ends);
  void step_launched(std::int64_t step, StreamHandle stream);
  void step_abandoned(std::int64_t step);
  Report poll();
  // For all of each transfer or, with `band` >= 0, for its bands up to that one.
  WaitResult wait(std::span<const std::int64_t> ids, StreamHandle stream, double timeout_s,
                  std::int64_t band = -1);
  // True when poll() would return something new, or the core is closed.
  bool wait_news(double timeout_s);
  std::vector<WindowRecord> windows(std::int64_t* dropped);
  // Joins every thread; waits for windows in flight for at most `timeout_s`. Idempotent.
  void close(double timeout_s);

  Backend& backend() { return *backend_; }
  const PoolLayout& device() const { return device_; }
  std::size_t live_transfers();
  std::size_t events() const { return events_.size(); }
  std::size_t events_in_use() const { return events_.in_use(); }

  static std::shared_ptr<Transfer> make_transfer(std::int64_t id, Direction direction,
                                                 TransferClass transfer_class, double deadline_s,
                                                 std::span<const std::int32_t> sources,
                                                 std::span<const std::int32_t> destinations,
                                                 std::span<const std::int64_t> after_steps);

 private:
  // The events a wait covers, kept from being recorded again until the wait is enqueued.
  struct Waits {
    explicit Waits(EventPool& pool) : events(pool) {}
    ~Waits() {
      for (PooledEvent* event : covered) events.end_wait(*event);
    }
    Waits(const Waits&) = delete;
    Waits& operator=(const Waits&) = delete;

    EventPool& events;
    std::vector<PooledEvent*> covered;
    std::vector<std::int64_t> owners;  // the transfer of each
  };

  WaitResult begin_waits(std::span<const std::int64_t> ids, std::int64_t band, Waits& waits);

  const PoolLayout device_;
  const PoolLayout host_;
  const std::unique_ptr<OrderingRules> rules_;
  const std::unique_ptr<Backend> backend_;
  EventPool events_;
  Board board_;
  StepWatchers watchers_;
  std::vector<std::unique_ptr<Arbiter>> arbiters_;
  std::mutex close_mutex_;
};

}  // namespace forebay
