// Prefaulting: the system allocates and clears a page at the first write, in the writing thread. These functions do
// it ahead.
#pragma once

#include <cstdint>

#include "program/aligned.h"
#include "program/pool.h"

namespace weft {

// Faults these pages in now, on all threads of the pool, one huge page at a time. The content stays; no other thread
// may write to the memory meanwhile.
void prefault_pages(Pool& pool, uint8_t* begin, uint8_t* end);

// Faults the offered pages in on the calling thread, unless another thread has; no thread may write to them
// meanwhile. Two threads at once need 1.5 times as long per page: so one thread prefaults while the others do other
// work.
void prefault_offered_pages(Pool& pool);

}  // namespace weft
