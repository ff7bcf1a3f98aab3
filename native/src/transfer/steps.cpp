#include "transfer/steps.hpp"

#include <string>

#include "transfer/types.hpp"

namespace forebay {

namespace {
constexpr std::size_t kMostPending = 1 << 16;
}

void StepLedger::introduce(std::int64_t step, StepState state) {
  if (step <= completed_step_ || pending_.count(step) != 0) {
    throw ProtocolError("step " + std::to_string(step) +
                        " was launched or abandoned before: number every step once");
  }
  if (pending_.size() >= kMostPending) {
    throw ProtocolError("step " + std::to_string(completed_step_ + 1) +
                        " was neither launched nor abandoned while " +
                        std::to_string(kMostPending) + " later ones were");
  }
  pending_.emplace(step, state);
  advance();
}

void StepLedger::launched(std::int64_t step) { introduce(step, StepState::launched); }

void StepLedger::abandoned(std::int64_t step) { introduce(step, StepState::abandoned); }

void StepLedger::completed(std::int64_t step) {
  const auto at = pending_.find(step);
  if (at == pending_.end()) return;
  at->second = StepState::completed;
  advance();
}

void StepLedger::withdrawn(std::int64_t step) { pending_.erase(step); }

void StepLedger::advance() {
  while (!pending_.empty()) {
    const auto first = pending_.begin();
    const bool gap = first->first != completed_step_ + 1;
    if (!rules_.step_passed(gap ? StepState::scheduled : first->second)) return;
    ++completed_step_;
    if (!gap) pending_.erase(first);
  }
}

}  // namespace forebay
