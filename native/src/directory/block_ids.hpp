// Block ids as callers give them: 32-bit numbers that count from 0, below a bound that they chose.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>

#include "errors.hpp"

namespace forebay {

using BlockIds = std::span<const std::int32_t>;

inline std::int32_t checked_max_blocks(std::int64_t max_blocks) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - 2;
  if (max_blocks >= 0 && max_blocks <= kMost) return static_cast<std::int32_t>(max_blocks);
  throw SettingsError("max_blocks=" + std::to_string(max_blocks) +
                      ": block ids are 32-bit numbers that count from 0");
}

inline std::int32_t checked_block(std::int64_t block, std::int32_t max_blocks) {
  if (block >= 0 && block < max_blocks) return static_cast<std::int32_t>(block);
  throw ProtocolError("block " + std::to_string(block) + " is none of the " +
                      std::to_string(max_blocks) + " there are");
}

inline void check_blocks(BlockIds blocks, std::int32_t max_blocks) {
  // Without a way out, so that the compiler looks at many at a time.
  bool all = true;
  for (const std::int32_t block : blocks) {
    all &= static_cast<std::uint32_t>(block) < static_cast<std::uint32_t>(max_blocks);
  }
  if (all) return;
  for (const std::int32_t block : blocks) checked_block(block, max_blocks);
}

}  // namespace forebay
