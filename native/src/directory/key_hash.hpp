// Where to look for a key. Never what it is: keys are compared whole.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>

namespace forebay {

// Seeded: keys come from outside, and who could choose many of one hash would make a list of a
// table.
class KeyHash {
 public:
  KeyHash() {
    std::random_device random;
    start_ = random() | static_cast<std::uint64_t>(random()) << 32;
    factor_ = random() | static_cast<std::uint64_t>(random()) << 32 | 1;
  }

  std::uint32_t operator()(const void* key, std::size_t bytes) const {
    std::uint64_t hash = start_ ^ bytes;
    const auto* at = static_cast<const std::byte*>(key);
    for (; bytes >= sizeof(std::uint64_t); bytes -= sizeof(std::uint64_t)) {
      hash = mixed(hash, at, sizeof(std::uint64_t));
      at += sizeof(std::uint64_t);
    }
    if (bytes) hash = mixed(hash, at, bytes);
    return static_cast<std::uint32_t>(hash ^ hash >> 32);
  }

 private:
  __extension__ using Product = unsigned __int128;

  std::uint64_t mixed(std::uint64_t hash, const std::byte* at, std::size_t bytes) const {
    std::uint64_t word = 0;
    std::memcpy(&word, at, bytes);
    const Product product = static_cast<Product>(hash ^ word) * factor_;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
  }

  std::uint64_t start_;
  std::uint64_t factor_;
};

}  // namespace forebay
