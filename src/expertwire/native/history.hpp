// What watched memory held before. Under the seeded scheduler a load that is not an acquire may return
// any value that its bytes have had since the last acquire or fence of the lane's block: whoever looks
// at a flag too weakly then finds what was there before the payload.
#pragma once

#include <vector>

#include "fiber.hpp"

namespace ew {

class History {
 public:
  History(const Range* ranges, u32 num_ranges);

  // Notes what has changed since the last call; `writer` did it, null: anybody (the HCA, a peer).
  // Compares, because an HCA stores through mappings of its own.
  void note(const BlockState* writer);
  void acquire(BlockState* block);                                           // all later loads are as new as this
  void written(const BlockState* block, const void* p, size_t num_bytes);    // it is about to store there itself
  void read(const BlockState* block, const void* p, void* value, size_t num_bytes, u64 random);

 private:
  struct Watched {
    const u8* begin;
    std::vector<u8> bytes;  // as they were at `now_`
  };
  struct Change {
    u64 time;
    const BlockState* writer;
    const u8* at;
    std::vector<u8> before;
  };
  struct Floor {  // a block does not read these bytes as they were before `time`: it has seen or stored newer ones
    const BlockState* block;
    const u8* at;
    size_t num_bytes;
    u64 time;
  };
  bool watches(const u8* at, size_t num_bytes) const;
  void raise_floor(const Floor& floor);

  u64 now_ = 0, forgotten_ = 0;  // changes up to `forgotten_` are not kept
  std::vector<Watched> watched_;
  std::vector<Change> changes_;
  std::vector<Floor> floors_;
};

inline bool overlaps(const u8* a, size_t a_bytes, const u8* b, size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

}  // namespace ew
