#include "transfer/backend_host.hpp"

#include <algorithm>
#include <cstring>

namespace forebay {

namespace {

HostEvent& as_event(Backend::Event event) { return *static_cast<HostEvent*>(event); }

// Copies `bytes` of the window's front. With a throttle, in slices: the link is shared fairly, and a
// stopping lane ends within one.
void copy_window(WorkStream& lane, const std::vector<Piece>& pieces, std::size_t bytes,
                 Throttle& throttle) {
  for (const Piece& piece : pieces) {
    const std::size_t end = std::min(piece.bytes, bytes);
    bytes -= end;
    const std::size_t slice = throttle.active() ? throttle.slice_bytes() : end;
    for (std::size_t at = 0; at < end; at += slice) {
      const std::size_t now = std::min(slice, end - at);
      std::memcpy(piece.destination + at, piece.source + at, now);
      if (throttle.active() && !lane.sleep_until(throttle.book(now))) {
        lane.fail("the lane was closed within a window");
        return;
      }
    }
  }
}

std::size_t total_bytes(const std::vector<Piece>& pieces) {
  std::size_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

}  // namespace

HostBackend::HostBackend(double link_bytes_per_s, std::uint64_t seed, Clock::duration longest_delay)
    : seed_(seed),
      longest_delay_(longest_delay),
      throttles_{Throttle(link_bytes_per_s), Throttle(link_bytes_per_s)} {}

HostBackend::~HostBackend() { HostBackend::close(); }

StreamHandle HostBackend::open_stream() {
  const std::lock_guard lock(mutex_);
  streams_.push_back(std::make_unique<WorkStream>(seed_ + streams_.size(), longest_delay_));
  return streams_.size();
}

StreamHandle HostBackend::open_lane(Direction direction, int) {
  const StreamHandle handle = open_stream();
  lanes_.add(direction, handle, &stream(handle));
  return handle;
}

WorkStream& HostBackend::stream(StreamHandle handle) const {
  const std::lock_guard lock(mutex_);
  if (handle == 0 || handle > streams_.size()) {
    throw ProtocolError("stream " + std::to_string(handle) +
                        " is no stream of this backend: use 0 for the calling thread");
  }
  return *streams_[handle - 1];
}

void HostBackend::copy(StreamHandle handle, std::span<const Piece> pieces) {
  auto& [direction, stream, lane] = lanes_.of(handle);
  Throttle& throttle = throttles_[index_of(direction)];
  lane->push([window = std::vector<Piece>(pieces.begin(), pieces.end()),
              faulty = lanes_.take_fault(direction), &throttle](WorkStream& on) {
    const std::size_t bytes = total_bytes(window);
    copy_window(on, window, faulty ? bytes / 2 : bytes, throttle);
    if (faulty) on.fail("injected fault");
  });
}

Backend::Event HostBackend::create_event() { return new HostEvent; }

void HostBackend::destroy_event(Event event) { delete static_cast<HostEvent*>(event); }

void HostBackend::record(Event event, StreamHandle handle) {
  if (handle == 0) {
    as_event(event).record()->settle(Signal::done, {});
    return;
  }
  WorkStream& on = stream(handle);
  on.push_record(as_event(event).record());
}

Signal HostBackend::query(Event event) {
  const auto recording = as_event(event).latest();
  return recording ? recording->state() : Signal::done;
}

Signal HostBackend::wait(Event event, double timeout_s) {
  const auto recording = as_event(event).latest();
  return recording ? recording->wait(bounded(timeout_s)) : Signal::done;
}

Signal HostBackend::stream_wait(StreamHandle handle, Event event, double timeout_s) {
  if (handle == 0) return wait(event, timeout_s);
  stream(handle).push_wait(as_event(event).latest());
  return Signal::done;
}

std::string HostBackend::error_text(Event event) {
  const auto recording = as_event(event).latest();
  return recording ? recording->error() : std::string();
}

void HostBackend::close() {
  std::vector<WorkStream*> open;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& each : streams_) open.push_back(each.get());
  }
  for (WorkStream* each : open) each->stop();
}

void HostBackend::hold_lane(Direction direction, int lane) {
  lanes_.at(direction, lane).lane->hold();
}

void HostBackend::release_lane(Direction direction, int lane) {
  lanes_.at(direction, lane).lane->release();
}

void HostBackend::fail_window(Direction direction, int skip) {
  lanes_.fail_window(direction, skip);
}

}  // namespace forebay
