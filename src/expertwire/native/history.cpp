// See history.hpp.
#include "history.hpp"

#include <algorithm>
#include <cstring>

namespace ew {

constexpr size_t kMaxChanges = 256, kWord = 4;

History::History(const Range* ranges, u32 num_ranges) {
  for (u32 i = 0; i < num_ranges; ++i) {
    const auto* begin = reinterpret_cast<const u8*>(ranges[i].addr);
    watched_.push_back({begin, std::vector<u8>(begin, begin + ranges[i].num_bytes)});
  }
}

void History::note(const BlockState* writer) {
  const u64 time = now_ + 1;
  for (Watched& range : watched_) {
    const size_t size = range.bytes.size();
    if (memcmp(range.begin, range.bytes.data(), size) == 0) continue;
    now_ = time;
    for (size_t i = 0; i < size;) {
      size_t end = i;
      while (end < size && memcmp(range.begin + end, &range.bytes[end], std::min(kWord, size - end)) != 0) end += kWord;
      end = std::min(end, size);
      if (end > i) changes_.push_back({time, writer, range.begin + i, {&range.bytes[i], &range.bytes[i] + (end - i)}});
      i = end + kWord;
    }
    memcpy(range.bytes.data(), range.begin, size);
  }
  if (changes_.size() <= kMaxChanges) return;
  const auto kept = changes_.end() - kMaxChanges / 2;
  forgotten_ = kept[-1].time;
  changes_.erase(changes_.begin(), kept);
}

void History::acquire(BlockState* block) {
  note(nullptr);
  block->view = now_;
  std::erase_if(floors_, [&](const Floor& floor) { return floor.block == block && floor.time <= now_; });
}

void History::raise_floor(const Floor& floor) {
  for (Floor& known : floors_)
    if (known.block == floor.block && known.at == floor.at && known.num_bytes == floor.num_bytes) {
      known.time = std::max(known.time, floor.time);
      return;
    }
  floors_.push_back(floor);
}

bool History::watches(const u8* at, size_t num_bytes) const {
  return std::any_of(watched_.begin(), watched_.end(), [&](const Watched& range) {
    return overlaps(range.begin, range.bytes.size(), at, num_bytes);
  });
}

void History::written(const BlockState* block, const void* p, size_t num_bytes) {
  const auto* at = static_cast<const u8*>(p);
  if (!watches(at, num_bytes)) return;
  note(nullptr);  // what is noted next may be this store
  raise_floor({block, at, num_bytes, now_ + 1});
}

void History::read(const BlockState* block, const void* p, void* value, size_t num_bytes, u64 random) {
  const auto* at = static_cast<const u8*>(p);
  memcpy(value, p, num_bytes);
  if (!watches(at, num_bytes)) return;
  note(nullptr);
  u64 oldest = std::max(block->view, forgotten_);
  for (const Floor& floor : floors_)
    if (floor.block == block && overlaps(floor.at, floor.num_bytes, at, num_bytes)) oldest = std::max(oldest, floor.time);
  const auto touches = [&](const Change& c) { return overlaps(c.at, c.before.size(), at, num_bytes); };
  for (const Change& c : changes_)
    if (c.writer == block && touches(c)) oldest = std::max(oldest, c.time);
  std::vector<u64> times;
  for (const Change& c : changes_)
    if (c.time > oldest && touches(c)) times.push_back(c.time);
  u64 seen = now_;
  if (!times.empty() && (random & 1)) seen = times[(random >> 1) % times.size()] - 1;
  for (size_t n = changes_.size(); n-- > 0;) {
    const Change& c = changes_[n];
    if (c.time <= seen || !touches(c)) continue;
    const u8* begin = std::max(at, c.at);
    const u8* end = std::min(at + num_bytes, c.at + c.before.size());
    memcpy(static_cast<u8*>(value) + (begin - at), c.before.data() + (begin - c.at), static_cast<size_t>(end - begin));
  }
  raise_floor({block, at, num_bytes, seen});
}

}  // namespace ew
