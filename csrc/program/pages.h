// Memory that the system has promised but not given yet: a page is found and cleared when it is first written to, by the thread that does.
#pragma once

#include <cstdint>

#include "program/aligned.h"
#include "program/pool.h"

namespace weft {

// Makes it give these pages now, to all threads of the pool at once, each a large page at a time. What they hold stays; nobody may write to them
// meanwhile.
void prefault_pages(Pool& pool, uint8_t* begin, uint8_t* end);

// Takes what is offered, in the thread that calls, if no other has; nobody may write to it meanwhile. Two threads at once take half as long
// again for each page: where there is other work, one takes them while the others do that.
void prefault_offered_pages(Pool& pool);

}  // namespace weft
