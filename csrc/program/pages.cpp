#include "program/pages.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#if defined(__linux__)
#include <sys/mman.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23   // since Linux 5.14; older headers lack it
#endif
#endif

namespace weft {
namespace {

// Asks Linux to fault in many small pages with one call. With two threads, faulting them in one by one takes ten times
// as long. Returns false if the system lacks the call. If memory is exhausted, the error shows when the memory is used.
bool populate(uint8_t* begin, uint8_t* end, uintptr_t page) {
#if defined(__linux__)
  const uintptr_t from = reinterpret_cast<uintptr_t>(begin) / page * page;
  return madvise(reinterpret_cast<void*>(from), reinterpret_cast<uintptr_t>(end) - from, MADV_POPULATE_WRITE) == 0 || errno != EINVAL;
#else
  (void)begin, (void)end, (void)page;
  return false;
#endif
}

void touch(uint8_t* begin, uint8_t* end, uintptr_t page) {
  for (uint8_t* at = begin; at < end; at += page - reinterpret_cast<uintptr_t>(at) % page) {
    volatile uint8_t* byte = at;
    *byte = *byte;
  }
}

// A range of memory in parts, each within one huge page. If two threads faulted in the same huge page, both would clear
// it, and the operating system would discard one copy. The operating system also holds a lock during a call. Small
// parts limit how long a thread that maps memory waits for this lock.
class HugePageParts {
 public:
  HugePageParts(uint8_t* begin, uint8_t* end) : begin_(begin), end_(end), first_(reinterpret_cast<uintptr_t>(begin) / large_page) {}

  int64_t count() const {
    return begin_ >= end_ ? 0 : static_cast<int64_t>((reinterpret_cast<uintptr_t>(end_) - 1) / large_page - first_) + 1;
  }
  void prefault(int64_t part) const {
    const uintptr_t from = (first_ + static_cast<uintptr_t>(part)) * large_page, page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    uint8_t* const begin = part == 0 ? begin_ : reinterpret_cast<uint8_t*>(from);
    uint8_t* const end = std::min(end_, reinterpret_cast<uint8_t*>(from + large_page));
    if (!populate(begin, end, page)) touch(begin, end, page);
  }

 private:
  uint8_t *begin_, *end_;
  uintptr_t first_;
};

}  // namespace

void prefault_pages(Pool& pool, uint8_t* begin, uint8_t* end) {
  const HugePageParts parts(begin, end);
  pool.run(parts.count(), [&](int64_t part, int) { parts.prefault(part); });
}

void prefault_offered_pages(Pool& pool) {
  if (!pool.offer.is_open.load(std::memory_order_relaxed) || !pool.offer.is_open.exchange(false)) return;
  const HugePageParts parts(pool.offer.begin, pool.offer.end);
  for (int64_t part = 0; part < parts.count(); part++) parts.prefault(part);
}

}  // namespace weft
