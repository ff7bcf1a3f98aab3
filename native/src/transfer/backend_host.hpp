// The common part of the backends that need no GPU: lanes that are threads, events, test hooks.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "transfer/backend.hpp"
#include "transfer/hooks.hpp"
#include "transfer/lane_table.hpp"
#include "transfer/throttle.hpp"
#include "transfer/work_stream.hpp"

namespace forebay {

class HostBackend : public Backend, public TestHooks {
 public:
  HostBackend(double link_bytes_per_s, std::uint64_t seed, Clock::duration longest_delay);
  ~HostBackend() override;

  StreamHandle open_lane(Direction direction, int lane) override;
  void copy(StreamHandle lane, std::span<const Piece> pieces) override;
  Event create_event() override;
  void destroy_event(Event event) override;
  void record(Event event, StreamHandle stream) override;
  Signal query(Event event) override;
  Signal wait(Event event, double timeout_s) override;
  Signal stream_wait(StreamHandle stream, Event event, double timeout_s) override;
  std::string error_text(Event event) override;
  void close() override;

  // A window that fails has half of its bytes copied.
  void hold_lane(Direction direction, int lane) override;
  void release_lane(Direction direction, int lane) override;
  void fail_window(Direction direction, int skip) override;

 protected:
  StreamHandle open_stream();
  // Throws ProtocolError for a handle that is no stream of this backend.
  WorkStream& stream(StreamHandle handle) const;

 private:
  const std::uint64_t seed_;
  const Clock::duration longest_delay_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<WorkStream>> streams_;  // handle - 1
  LaneTable<WorkStream*> lanes_;
  std::array<Throttle, kDirections> throttles_;
};

// Real copies by the lanes' threads, optionally at a link's rate. Its only compute stream is 0: the
// calling thread, whose work is complete when it makes the call.
class CpuBackend final : public HostBackend {
 public:
  explicit CpuBackend(double link_bytes_per_s)
      : HostBackend(link_bytes_per_s, 0, Clock::duration::zero()) {}
};

}  // namespace forebay
