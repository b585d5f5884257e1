#include <string>

#include "bind/bindings.h"
#include "program/pages.h"
#include "program/pool.h"

namespace weft {

constexpr int most_threads = 1024;

void bind_pool(nb::module_& module) {
  nb::class_<Pool>(module, "Pool", "Threads that share the work of a step. A backend has one pool; one thread at a time calls it.")
      .def("__init__", [](Pool* pool, int threads) {
        if (threads < 1 || threads > most_threads)
          throw nb::value_error(("threads is " + std::to_string(threads) + "; allowed: 1 to " + std::to_string(most_threads)).c_str());
        new (pool) Pool(threads);
      }, nb::arg("threads"))
      .def_prop_ro("threads", &Pool::threads)
      .def("take_pages", [](Pool& pool, Array<uint8_t, 1> bytes) {
        nb::gil_scoped_release release;
        prefault_pages(pool, bytes.data(), bytes.data() + bytes.size());
      }, nb::arg("bytes").noconvert())
      // See Pool::Offer. `withdraw_pages` returns false if a thread has taken the offer.
      .def("offer_pages", [](Pool& pool, Array<uint8_t, 1> bytes) {
        pool.offer.begin = bytes.data();
        pool.offer.end = bytes.data() + bytes.size();
        pool.offer.is_open = bytes.size() > 0;
      }, nb::arg("bytes").noconvert())
      .def("withdraw_pages", [](Pool& pool) { return pool.offer.is_open.exchange(false); });
}

}  // namespace weft
