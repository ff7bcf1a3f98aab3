// A stream that is a thread: work runs in order, and nothing spins while there is none.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>

#include "transfer/host_event.hpp"

namespace forebay {

class WorkStream {
 public:
  // Runs on the stream's thread. Must return soon after stopping() became true.
  using Work = std::function<void(WorkStream&)>;

  // Each piece of work starts after a random delay of up to `longest_delay`.
  WorkStream(std::uint64_t seed, Clock::duration longest_delay);
  ~WorkStream();
  WorkStream(const WorkStream&) = delete;
  WorkStream& operator=(const WorkStream&) = delete;

  void push(Work work);
  void push_record(std::shared_ptr<Recording> recording);
  void push_wait(std::shared_ptr<Recording> recording);

  // While held, the stream begins nothing new.
  void hold();
  void release();
  // Drops what was not begun, fails its recordings and joins the thread. Idempotent.
  void stop();

  // For work, on the stream's thread:
  bool sleep_until(Clock::time_point until);  // false when the stream is stopping
  bool stopping() const;
  void fail(std::string error) { fault_ = std::move(error); }  // the next recording fails

 private:
  struct Entry {
    Work work;
    std::shared_ptr<Recording> recording;  // null unless this entry is a record
  };
  void push_entry(Entry entry);
  void run();
  void run_entry(Entry& entry);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Entry> queue_;
  bool held_ = false;
  bool stopping_ = false;
  std::string fault_;  // touched by the stream's thread only
  std::mt19937_64 random_;
  const Clock::duration longest_delay_;
  std::thread thread_;
};

}  // namespace forebay
