#include "cuda/cuda_backend.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

namespace forebay::cuda {

namespace {

// Between questions of a wait that has spun long enough. A window of 4 MiB takes 77 us on a PCIe 5
// link and two are in flight, so a lane refilled this much late costs no bandwidth.
constexpr std::chrono::microseconds kNap{20};

// A batch holds the driver's lock for each of its pieces, and whoever launches a kernel needs it: beside
// batches of 64 KiB pieces both ways, a launch took 1,230 us at the 99th percentile on an H200, beside
// rows of the same 23 us. Rows leave the link idle for a moment behind each block (0.91 of a plain copy's
// rate and not 0.98), also where one cuMemcpy3DBatchAsync takes those of a whole window, so blocks of few
// large pieces go by batch.
constexpr std::size_t kPiecesPerRows = 8;

struct OwnEvent {
  EventHandle handle = nullptr;
  std::atomic<Result> error{kSuccess};
};

OwnEvent& as_event(Backend::Event event) { return *static_cast<OwnEvent*>(event); }

Stream as_stream(StreamHandle handle) { return reinterpret_cast<Stream>(handle); }

}  // namespace

CudaBackend::CudaBackend(const BackendSettings& settings)
    : driver_(Driver::get()), settings_(settings), device_(settings.device_index) {
  Device device = 0;
  int pitch = 0;
  driver_.check("looking for the device", driver_.device(&device, settings.device_index));
  driver_.check("asking for the longest pitch",
                driver_.device_attribute(&pitch, kMaxPitch, device));
  longest_pitch_ = static_cast<std::size_t>(std::max(0, pitch));
  if (settings.timing) clock_ = std::make_unique<DeviceClock>(device_);
}

CudaBackend::~CudaBackend() {
  CudaBackend::close();
  const DeviceContext::Scope scope(device_);
  lanes_.visit([this](Lane& lane) {
    if (lane.began != nullptr) driver_.destroy_event(lane.began);
    if (lane.gate != nullptr) driver_.free_host(const_cast<std::uint32_t*>(lane.gate));
  });
}

void CudaBackend::enter_thread() {
  device_.enter();
  // Sleeps are of tens of microseconds; the kernel may lengthen them by as much unless told.
  prctl(PR_SET_TIMERSLACK, 1UL);
}

StreamHandle CudaBackend::open_lane(Direction direction, int) {
  const DeviceContext::Scope scope(device_);
  Lane lane;
  int lowest = 0;
  int highest = 0;
  driver_.check("asking for stream priorities", driver_.priority_range(&lowest, &highest));
  driver_.check("opening a lane",
                driver_.create_stream(&lane.stream, kStreamNonBlocking, lowest));
  if (settings_.timing) {
    driver_.check("making an event", driver_.create_event(&lane.began, kEventDefault));
  }
  const auto handle = reinterpret_cast<StreamHandle>(lane.stream);
  lanes_.add(direction, handle, std::move(lane));
  return handle;
}

void CudaBackend::copy(StreamHandle handle, std::span<const Piece> pieces) {
  auto& [direction, stream, lane] = lanes_.of(handle);
  if (lane.began != nullptr) {
    driver_.check("recording an event", driver_.record_event(lane.began, lane.stream));
  }
  if (lanes_.take_fault(direction)) throw BackendError("injected fault");
  if (pieces.size() > 1 && !settings_.piece_by_piece) {
    find_rows(lane, direction, pieces);
    if (lane.rows.size() * kPiecesPerRows <= pieces.size()) return copy_rows(lane);
    if (driver_.copy_batch != nullptr || driver_.copy_batch_12 != nullptr) {
      return copy_batch(lane, pieces);
    }
  }
  for (const Piece& piece : pieces) {
    driver_.check("copying",
                  driver_.copy(reinterpret_cast<Address>(piece.destination),
                               reinterpret_cast<Address>(piece.source), piece.bytes, lane.stream));
  }
}

void CudaBackend::find_rows(Lane& lane, Direction direction, std::span<const Piece> pieces) {
  const auto together = [&](const Piece& first, const Piece& last) {
    return direction == Direction::load
               ? lane.device_memory.hold(first.destination, last.destination, last.bytes)
               : lane.device_memory.hold(first.source, last.source, last.bytes);
  };
  even_rows(pieces, longest_pitch_, together, lane.rows);
}

void CudaBackend::copy_rows(Lane& lane) {
  for (const Rows& rows : lane.rows) {
    if (rows.in_slices()) {
      copy_slices(rows, lane.stream);
      continue;
    }
    CopyRows copy;
    copy.source = reinterpret_cast<Address>(rows.first.source);
    copy.source_pitch = rows.source.pitch;
    copy.destination = reinterpret_cast<Address>(rows.first.destination);
    copy.destination_pitch = rows.destination.pitch;
    copy.width = rows.first.bytes;
    copy.height = rows.count;
    driver_.check("copying rows", driver_.copy_rows(&copy, lane.stream));
  }
}

// Rows further apart than a pitch may be: each is a slice.
void CudaBackend::copy_slices(const Rows& rows, Stream stream) {
  CopySlices copy;
  copy.source = reinterpret_cast<Address>(rows.first.source);
  copy.source_pitch = rows.source.pitch;
  copy.source_rows = rows.source.height;
  copy.destination = reinterpret_cast<Address>(rows.first.destination);
  copy.destination_pitch = rows.destination.pitch;
  copy.destination_rows = rows.destination.height;
  copy.width = rows.first.bytes;
  copy.height = 1;
  copy.depth = rows.count;
  driver_.check("copying rows", driver_.copy_slices(&copy, stream));
}

void CudaBackend::copy_batch(Lane& lane, std::span<const Piece> pieces) {
  lane.destinations.clear();
  lane.sources.clear();
  lane.sizes.clear();
  for (const Piece& piece : pieces) {
    lane.destinations.push_back(reinterpret_cast<Address>(piece.destination));
    lane.sources.push_back(reinterpret_cast<Address>(piece.source));
    lane.sizes.push_back(piece.bytes);
  }
  CopyAttributes attributes;
  std::size_t first = 0;
  std::size_t failed = 0;
  const std::size_t count = pieces.size();
  const Result result =
      driver_.copy_batch != nullptr
          ? driver_.copy_batch(lane.destinations.data(), lane.sources.data(), lane.sizes.data(),
                               count, &attributes, &first, 1, lane.stream)
          : driver_.copy_batch_12(lane.destinations.data(), lane.sources.data(), lane.sizes.data(),
                                  count, &attributes, &first, 1, &failed, lane.stream);
  driver_.check("copying a window", result);
}

Backend::Event CudaBackend::create_event() {
  const DeviceContext::Scope scope(device_);
  auto event = std::make_unique<OwnEvent>();
  driver_.check("making an event",
                driver_.create_event(&event->handle,
                                     settings_.timing ? kEventDefault : kEventDisableTiming));
  return event.release();
}

void CudaBackend::destroy_event(Event event) {
  const DeviceContext::Scope scope(device_);
  driver_.destroy_event(as_event(event).handle);
  delete &as_event(event);
}

void CudaBackend::record(Event event, StreamHandle stream) {
  const DeviceContext::Scope scope(device_);
  as_event(event).error = kSuccess;
  driver_.check("recording an event",
                driver_.record_event(as_event(event).handle, as_stream(stream)));
}

Signal CudaBackend::query(Event event) {
  const DeviceContext::Scope scope(device_);
  const Result result = driver_.query_event(as_event(event).handle);
  if (result == kSuccess) return Signal::done;
  if (result == kNotReady) return Signal::pending;
  as_event(event).error = result;
  return Signal::failed;
}

// Asks instead of blocking in the driver, which knows no bound: a link that stops must not take the
// thread with it.
Signal CudaBackend::wait(Event event, double timeout_s) {
  const auto began = Clock::now();
  const auto until = began + bounded(timeout_s);
  const auto spun = began + bounded(settings_.spin_s);
  for (;;) {
    const Signal signal = query(event);
    const auto now = Clock::now();
    if (signal != Signal::pending || now >= until) return signal;
    if (now >= spun) std::this_thread::sleep_for(std::min<Clock::duration>(kNap, until - now));
  }
}

Signal CudaBackend::stream_wait(StreamHandle stream, Event event, double) {
  const DeviceContext::Scope scope(device_);
  const Result result = driver_.wait_event(as_stream(stream), as_event(event).handle, 0);
  if (result == kSuccess) return Signal::done;
  as_event(event).error = result;
  return Signal::failed;
}

std::string CudaBackend::error_text(Event event) {
  const Result error = as_event(event).error;
  return error == kSuccess ? std::string() : driver_.describe("its event failed", error);
}

bool CudaBackend::span(StreamHandle handle, Event event, double& start_s, double& end_s) {
  if (clock_ == nullptr) return false;
  double began_s = 0;
  double ended_s = 0;
  if (!clock_->when(lanes_.of(handle).lane.began, began_s)) return false;
  if (!clock_->when(as_event(event).handle, ended_s)) return false;
  start_s = began_s;
  end_s = ended_s;
  return true;
}

bool CudaBackend::when(std::uint64_t driver_event, double& at_s) {
  return clock_ != nullptr && clock_->when(reinterpret_cast<EventHandle>(driver_event), at_s);
}

void CudaBackend::close() {
  if (std::exchange(closed_, true)) return;
  const DeviceContext::Scope scope(device_);
  lanes_.visit([this](Lane& lane) {
    if (lane.gate != nullptr) *lane.gate = 1;
    // Returns at once; the stream goes when what it carries has ended.
    driver_.destroy_stream(lane.stream);
  });
}

void CudaBackend::hold_lane(Direction direction, int lane) {
  const DeviceContext::Scope scope(device_);
  const std::lock_guard lock(gates_mutex_);
  Lane& held = lanes_.at(direction, lane).lane;
  if (held.gate == nullptr) {
    void* memory = nullptr;
    driver_.check("allocating a gate", driver_.allocate_host(&memory, 64, kHostPortable));
    held.gate = static_cast<volatile std::uint32_t*>(memory);
  }
  *held.gate = 0;
  driver_.check("holding a lane",
                driver_.wait_value(held.stream, reinterpret_cast<Address>(held.gate), 1,
                                   kWaitValueEqual));
}

void CudaBackend::release_lane(Direction direction, int lane) {
  const std::lock_guard lock(gates_mutex_);
  Lane& held = lanes_.at(direction, lane).lane;
  if (held.gate != nullptr) *held.gate = 1;
}

void CudaBackend::fail_window(Direction direction, int skip) {
  lanes_.fail_window(direction, skip);
}

}  // namespace forebay::cuda
