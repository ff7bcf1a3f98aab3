// What the core asks of a machine. Small on purpose: everything that decides is outside of it.
//
// A backend follows the rules of CUDA streams: work of one stream runs in order, streams run in
// any order, an event that was never recorded counts as complete, and a wait covers the event's
// latest record at the time of the call.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "transfer/types.hpp"

namespace forebay {

enum class Signal : std::uint8_t { pending, done, failed };

class Backend {
 public:
  using Event = void*;

  virtual ~Backend() = default;

  // Called once by every thread of the core before its first other call.
  virtual void enter_thread() {}

  // Opens the stream of lane `lane`. Lanes live until close().
  virtual StreamHandle open_lane(Direction direction, int lane) = 0;

  // Enqueues one window. `pieces` may be forgotten when the call returns. Throws BackendError; then
  // the core takes the window as touched.
  virtual void copy(StreamHandle lane, std::span<const Piece> pieces) = 0;

  virtual Event create_event() = 0;
  virtual void destroy_event(Event event) = 0;
  virtual void record(Event event, StreamHandle stream) = 0;
  virtual Signal query(Event event) = 0;
  // Blocks the calling thread, without spinning, for at most `timeout_s`.
  virtual Signal wait(Event event, double timeout_s) = 0;
  // Makes `stream` wait for the event. Where the stream is the calling thread this blocks for at
  // most `timeout_s`; elsewhere it enqueues and returns `done`.
  virtual Signal stream_wait(StreamHandle stream, Event event, double timeout_s) = 0;
  // Why an event failed.
  virtual std::string error_text(Event event) = 0;

  // When the window whose `event` completed began and ended on the device, on the clock of now_s().
  // False where the backend does not take that; then the host's view serves.
  virtual bool span(StreamHandle lane, Event event, double& start_s, double& end_s) {
    static_cast<void>(lane);
    static_cast<void>(event);
    static_cast<void>(start_s);
    static_cast<void>(end_s);
    return false;
  }

  // When an event of the caller's, by its driver's handle, completed, on the clock of now_s(). False
  // where it has not, or where the backend takes no times.
  virtual bool when(std::uint64_t driver_event, double& at_s) {
    static_cast<void>(driver_event);
    static_cast<void>(at_s);
    return false;
  }

  // Ends every stream the backend opened and joins its threads; work not yet run is dropped and its
  // events fail. Idempotent. Other calls stay safe afterwards.
  virtual void close() = 0;
};

}  // namespace forebay
