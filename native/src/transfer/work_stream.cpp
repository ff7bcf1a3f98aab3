#include "transfer/work_stream.hpp"

#include <utility>

namespace forebay {

namespace {
constexpr const char* kClosed = "the stream was closed before this ran";
constexpr std::chrono::milliseconds kStopCheck{5};
}  // namespace

WorkStream::WorkStream(std::uint64_t seed, Clock::duration longest_delay)
    : random_(seed), longest_delay_(longest_delay), thread_([this] { run(); }) {}

WorkStream::~WorkStream() { stop(); }

void WorkStream::push(Work work) { push_entry(Entry{std::move(work), nullptr}); }

void WorkStream::push_record(std::shared_ptr<Recording> recording) {
  push_entry(Entry{nullptr, std::move(recording)});
}

void WorkStream::push_wait(std::shared_ptr<Recording> recording) {
  if (!recording) return;
  push([recording = std::move(recording)](WorkStream& stream) {
    while (recording->wait(kStopCheck) == Signal::pending && !stream.stopping()) {
    }
  });
}

void WorkStream::push_entry(Entry entry) {
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_) {
      queue_.push_back(std::move(entry));
      changed_.notify_all();
      return;
    }
  }
  if (entry.recording) entry.recording->settle(Signal::failed, kClosed);
}

void WorkStream::hold() {
  const std::lock_guard lock(mutex_);
  held_ = true;
}

void WorkStream::release() {
  const std::lock_guard lock(mutex_);
  held_ = false;
  changed_.notify_all();
}

void WorkStream::stop() {
  std::deque<Entry> dropped;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    dropped.swap(queue_);
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  for (Entry& entry : dropped) {
    if (entry.recording) entry.recording->settle(Signal::failed, kClosed);
  }
}

bool WorkStream::sleep_until(Clock::time_point until) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, until, [this] { return stopping_; });
  return !stopping_;
}

bool WorkStream::stopping() const {
  const std::lock_guard lock(mutex_);
  return stopping_;
}

void WorkStream::run() {
  for (;;) {
    Entry entry;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stopping_ || (!held_ && !queue_.empty()); });
      if (stopping_) return;
      entry = std::move(queue_.front());
      queue_.pop_front();
    }
    run_entry(entry);
  }
}

void WorkStream::run_entry(Entry& entry) {
  if (longest_delay_ > Clock::duration::zero()) {
    std::uniform_int_distribution<Clock::rep> delay(0, longest_delay_.count());
    sleep_until(Clock::now() + Clock::duration(delay(random_)));
  }
  if (entry.recording) {
    const bool good = fault_.empty();
    entry.recording->settle(good ? Signal::done : Signal::failed, std::exchange(fault_, {}));
    return;
  }
  entry.work(*this);
}

}  // namespace forebay
