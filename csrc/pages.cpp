#include "pages.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#if defined(__linux__)
#include <sys/mman.h>
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23   // of Linux 5.14, and of later headers than some of those that this is built with
#endif
#endif

namespace weft {
namespace {

// One call for many small pages: to fault them in one by one takes two threads ten times as long. False where the system has no such call; where
// it has no memory, that shows when the memory is needed.
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

void take_piece(uint8_t* begin, uint8_t* end) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  if (!populate(begin, end, page)) touch(begin, end, page);
}

}  // namespace

void take_pages(Pool& pool, uint8_t* begin, uint8_t* end) {
  if (begin >= end) return;
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) / large_page;
  const int64_t pieces = static_cast<int64_t>((reinterpret_cast<uintptr_t>(end) - 1) / large_page - first) + 1;
  // No large page is in two pieces: two threads would each clear one, and one of them for nothing.
  pool.run(pieces, [&](int64_t piece, int) {
    const uintptr_t from = (first + static_cast<uintptr_t>(piece)) * large_page;
    uint8_t* const piece_begin = piece == 0 ? begin : reinterpret_cast<uint8_t*>(from);
    take_piece(piece_begin, std::min(end, reinterpret_cast<uint8_t*>(from + large_page)));
  });
}

void take_offered_pages(Pool& pool) {
  if (pool.offer.is_open.load(std::memory_order_relaxed) && pool.offer.is_open.exchange(false)) take_piece(pool.offer.begin, pool.offer.end);
}

}  // namespace weft
