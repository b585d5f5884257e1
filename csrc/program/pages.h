// Prefaulting. The operating system allocates and clears a page at the first write, in the thread that writes. These
// functions write ahead of time, so that a step does not wait for that.
#pragma once

#include <cstdint>

#include "program/aligned.h"
#include "program/pool.h"

namespace weft {

// Faults these pages in now, on all threads of the pool, one huge page at a time. The content stays; no other thread
// may write to the memory during the call.
void prefault_pages(Pool& pool, uint8_t* begin, uint8_t* end);

// Faults the offered pages in on the calling thread, unless another thread has taken the offer. No thread may write to
// them during the call. Only one thread does this while the others compute: two threads at once need 1.5 times as long
// per page.
void prefault_offered_pages(Pool& pool);

}  // namespace weft
