// A table that grows piece by piece: what lies in it never moves, so that growing copies nothing,
// and an index far behind all others costs one piece.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace forebay {

template <typename Row>
class Rows {
 public:
  // The row, or nullptr where no room was made for it; never for a negative index.
  const Row* find(std::int64_t index) const {
    const auto piece = static_cast<std::uint64_t>(index) >> kShift;
    if (piece >= pieces_.size() || !pieces_[piece]) return nullptr;
    return &pieces_[piece][index & kMask];
  }

  Row& operator[](std::int64_t index) { return pieces_[index >> kShift][index & kMask]; }
  const Row& operator[](std::int64_t index) const {
    return pieces_[index >> kShift][index & kMask];
  }

  // Makes room for row `index`, not negative.
  void reach(std::int32_t index) {
    const auto piece = static_cast<std::size_t>(index) >> kShift;
    if (piece >= pieces_.size()) pieces_.resize(piece + 1);
    if (!pieces_[piece]) pieces_[piece] = std::make_unique<Row[]>(kMask + 1);
  }

 private:
  static constexpr int kShift = 12;
  static constexpr std::int64_t kMask = (1 << kShift) - 1;

  std::vector<std::unique_ptr<Row[]>> pieces_;
};

}  // namespace forebay
