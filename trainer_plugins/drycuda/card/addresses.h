// Places segments where CUDA's Linux driver does: in chunks of address space, 32 MiB or a multiple.
//
// Free blocks of one size are ordered by address, so addresses decide which one torch's allocator takes.
// The rule, from docs/internals/measurements.md: a segment lies in the newest chunk with room for it, at the lowest
// place, else in a new chunk, in the highest released range that is large enough or else below all others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>

namespace dry {

class Addresses {
 public:
  uintptr_t take(size_t num_bytes) {
    for (auto chunk = chunks_.rbegin(); chunk != chunks_.rend(); ++chunk)
      if (const uintptr_t address = chunk->room_for(num_bytes)) return put(*chunk, address, num_bytes);
    Chunk& made = new_chunk((num_bytes + kChunkBytes - 1) / kChunkBytes * kChunkBytes);
    return put(made, made.low, num_bytes);
  }

  // Returns whether there was such a segment.
  bool give_back(uintptr_t address) {
    for (auto chunk = chunks_.begin(); chunk != chunks_.end(); ++chunk) {
      if (chunk->segments.erase(address) == 0) continue;
      if (chunk->segments.empty()) {
        release(chunk->low, chunk->high);
        chunks_.erase(chunk);
      }
      return true;
    }
    return false;
  }

 private:
  static constexpr size_t kChunkBytes = 32u << 20;

  struct Chunk {
    uintptr_t low, high;
    std::map<uintptr_t, size_t> segments;

    uintptr_t room_for(size_t num_bytes) const {
      uintptr_t at = low;
      for (const auto& [address, size] : segments) {
        if (address - at >= num_bytes) return at;
        at = address + size;
      }
      return high - at >= num_bytes ? at : 0;
    }
  };

  uintptr_t put(Chunk& chunk, uintptr_t address, size_t num_bytes) {
    chunk.segments[address] = num_bytes;
    return address;
  }

  Chunk& new_chunk(size_t num_bytes) {
    for (auto gap = gaps_.rbegin(); gap != gaps_.rend(); ++gap) {
      const auto [low, high] = *gap;
      if (high - low < num_bytes) continue;
      gaps_.erase(low);
      if (low < high - num_bytes) gaps_[low] = high - num_bytes;
      chunks_.push_back({high - num_bytes, high, {}});
      return chunks_.back();
    }
    end_ -= num_bytes;
    chunks_.push_back({end_, end_ + num_bytes, {}});
    return chunks_.back();
  }

  void release(uintptr_t low, uintptr_t high) {
    for (auto gap = gaps_.begin(); gap != gaps_.end();) {
      if (gap->second != low && gap->first != high) {
        ++gap;
        continue;
      }
      low = std::min(low, gap->first);
      high = std::max(high, gap->second);
      gap = gaps_.erase(gap);
    }
    if (low == end_) end_ = high;
    else gaps_[low] = high;
  }

  std::list<Chunk> chunks_;              // the oldest first
  std::map<uintptr_t, uintptr_t> gaps_;  // released: low and high
  uintptr_t end_ = 0x500000000000;       // far from a program's own memory
};

}  // namespace dry
