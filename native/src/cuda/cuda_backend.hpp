// Lanes and events of a CUDA device.
//
// A window is one call of the driver. Lanes have the lowest priority the device offers, which orders
// kernels and, as measured, not copies: what is urgent goes first because each lane has at most one
// window in flight, not because of the driver.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "transfer/backend.hpp"
#include "cuda/device_clock.hpp"
#include "cuda/driver.hpp"
#include "cuda/allocations.hpp"
#include "cuda/even_rows.hpp"
#include "transfer/hooks.hpp"
#include "transfer/lane_table.hpp"

namespace forebay::cuda {

struct BackendSettings {
  int device_index = 0;
  // A wait asks the driver without pause for so long, then sleeps between questions.
  double spin_s = 20e-6;
  // Events that tell when windows began and ended, at a cost per window; see span().
  bool timing = false;
  // One call of the driver a piece, as drivers before CUDA 12.8 need it.
  bool piece_by_piece = false;
};

class CudaBackend final : public Backend, public TestHooks {
 public:
  // Throws SettingsError without a driver, or without that device.
  explicit CudaBackend(const BackendSettings& settings);
  ~CudaBackend() override;

  void enter_thread() override;
  StreamHandle open_lane(Direction direction, int lane) override;
  void copy(StreamHandle lane, std::span<const Piece> pieces) override;
  Event create_event() override;
  void destroy_event(Event event) override;
  void record(Event event, StreamHandle stream) override;
  Signal query(Event event) override;
  Signal wait(Event event, double timeout_s) override;
  Signal stream_wait(StreamHandle stream, Event event, double timeout_s) override;
  std::string error_text(Event event) override;
  bool span(StreamHandle lane, Event event, double& start_s, double& end_s) override;
  bool when(std::uint64_t driver_event, double& at_s) override;
  void close() override;

  void hold_lane(Direction direction, int lane) override;
  void release_lane(Direction direction, int lane) override;
  void fail_window(Direction direction, int skip) override;

 private:
  struct Lane {
    Allocations device_memory;
    Stream stream = nullptr;
    EventHandle began = nullptr;                  // with timing: before the window in flight
    volatile std::uint32_t* gate = nullptr;       // pinned; the lane waits for it to be 1 when held
    std::vector<Address> destinations, sources;   // scratch of its arbiter
    std::vector<std::size_t> sizes;
    std::vector<Rows> rows;
  };

  void find_rows(Lane& lane, Direction direction, std::span<const Piece> pieces);
  void copy_rows(Lane& lane);
  void copy_slices(const Rows& rows, Stream stream);
  void copy_batch(Lane& lane, std::span<const Piece> pieces);

  const Driver& driver_;
  const BackendSettings settings_;
  const DeviceContext device_;
  std::size_t longest_pitch_ = 0;
  LaneTable<Lane> lanes_;
  std::unique_ptr<DeviceClock> clock_;  // with timing
  std::mutex gates_mutex_;
  bool closed_ = false;
};

}  // namespace forebay::cuda
