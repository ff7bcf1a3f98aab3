#include "transfer/hazards.hpp"

namespace forebay {

namespace {

// A slot's pool is written by one direction and read by the other, so an access is a write exactly
// when its owner's direction is the one that writes that pool.
bool behind(const Access& access, Direction direction) {
  for (const Access* at = access.previous; at != nullptr; at = at->previous) {
    if (at->owner->direction == direction) return true;
  }
  return false;
}

void push(Access*& tail, Access& access, Transfer& owner) {
  access.previous = tail;
  access.next = nullptr;
  access.owner = &owner;
  if (tail != nullptr) tail->next = &access;
  tail = &access;
}

bool take(Access*& tail, Access& access) {
  const bool followed = access.next != nullptr;
  if (access.previous != nullptr) access.previous->next = access.next;
  if (followed) {
    access.next->previous = access.previous;
  } else {
    tail = access.previous;
  }
  return followed;
}

Direction opposite(Direction direction) {
  return direction == Direction::load ? Direction::save : Direction::load;
}

}  // namespace

Hazards::Hazards(std::int64_t device_slots, std::int64_t host_slots, const OrderingRules& rules)
    : device_(static_cast<std::size_t>(device_slots)),
      host_(static_cast<std::size_t>(host_slots)),
      rules_(rules) {}

Hazards::Tails& Hazards::tails_read(const Transfer& transfer) {
  return transfer.direction == Direction::load ? host_ : device_;
}

Hazards::Tails& Hazards::tails_written(const Transfer& transfer) {
  return transfer.direction == Direction::load ? device_ : host_;
}

void Hazards::join(Transfer& transfer) {
  Tails& read = tails_read(transfer);
  Tails& written = tails_written(transfer);
  for (std::size_t i = 0; i < transfer.sources.size(); ++i) {
    const auto source = static_cast<std::size_t>(transfer.sources[i]);
    const auto destination = static_cast<std::size_t>(transfer.destinations[i]);
    push(read[source], transfer.accesses[2 * i], transfer);
    push(written[destination], transfer.accesses[2 * i + 1], transfer);
  }
}

bool Hazards::leave(Transfer& transfer, std::int64_t block) {
  const auto i = static_cast<std::size_t>(block);
  const auto source = static_cast<std::size_t>(transfer.sources[i]);
  const auto destination = static_cast<std::size_t>(transfer.destinations[i]);
  const bool read = take(tails_read(transfer)[source], transfer.accesses[2 * i]);
  const bool written = take(tails_written(transfer)[destination], transfer.accesses[2 * i + 1]);
  return read || written;
}

bool Hazards::clear(const Transfer& transfer, std::int64_t block) const {
  const auto i = static_cast<std::size_t>(block);
  const Access& read = transfer.accesses[2 * i];
  const Access& written = transfer.accesses[2 * i + 1];
  const Direction mine = transfer.direction;
  return rules_.read_may_begin(behind(read, opposite(mine))) &&
         rules_.write_may_begin(behind(written, mine), behind(written, opposite(mine)));
}

bool Hazards::writes_twice(const Transfer& transfer) const {
  for (std::int64_t block = transfer.blocks_done; block < transfer.blocks(); ++block) {
    const Access* at = transfer.accesses[2 * static_cast<std::size_t>(block) + 1].previous;
    for (; at != nullptr; at = at->previous) {
      if (at->owner == &transfer) return true;
    }
  }
  return false;
}

void Hazards::blockers(const Transfer& transfer, std::int64_t block,
                       std::vector<Transfer*>& out) const {
  const auto i = static_cast<std::size_t>(block);
  const Direction writer = opposite(transfer.direction);
  for (const Access* at = transfer.accesses[2 * i].previous; at; at = at->previous) {
    if (at->owner->direction == writer) out.push_back(at->owner);
  }
  for (const Access* at = transfer.accesses[2 * i + 1].previous; at; at = at->previous) {
    out.push_back(at->owner);
  }
}

}  // namespace forebay
