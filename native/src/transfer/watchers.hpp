// One thread per compute stream that blocks on the events of its steps.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "transfer/board.hpp"

namespace forebay {

class StepWatchers {
 public:
  StepWatchers(Board& board, EventPool& events, Backend& backend)
      : board_(board), events_(events), backend_(backend) {}
  ~StepWatchers() { stop(); }
  StepWatchers(const StepWatchers&) = delete;
  StepWatchers& operator=(const StepWatchers&) = delete;

  // Reports `step` to the board once `event` completed. Steps of one stream end in order. A step
  // whose event fails never completes: what it should have written is not there.
  // Throws ProtocolError when there are too many streams.
  void watch(StreamHandle stream, std::int64_t step, PooledEvent& event);
  // Joins every thread. Idempotent.
  void stop();

 private:
  struct Entry {
    std::int64_t step;
    PooledEvent* event;
  };
  struct Watcher {
    std::deque<Entry> entries;
    std::condition_variable changed;
    std::thread thread;
  };

  void run(Watcher& watcher);
  bool await(const Entry& entry);
  bool stopping();

  Board& board_;
  EventPool& events_;
  Backend& backend_;
  std::mutex mutex_;
  bool stopping_ = false;
  std::map<StreamHandle, std::unique_ptr<Watcher>> watchers_;
};

}  // namespace forebay
