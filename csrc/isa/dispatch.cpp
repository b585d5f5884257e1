// Finds the kernel tables that this processor supports, and keeps the one in use.
#include <atomic>
#include <cstring>

#include "kernels/kernels.h"

namespace weft {

namespace portable { extern const Kernels table; }
#ifdef WEFT_X86
namespace avx2 { extern const Kernels table; }
namespace avx512 { extern const Kernels table; }
namespace avx512vnni { extern const Kernels table; }
namespace zen4 { Kernels with_pairs(Kernels table); }
#endif

namespace {

struct Choices {
  const Kernels* tables[5];
  const char* names[5];
  int count = 0;

  void add(const Kernels& table) {
    tables[count] = &table;
    names[count++] = table.name;
  }

  // Adds the tables that this processor can run, fastest first.
  Choices() {
#ifdef WEFT_X86
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
    if (has_vnni && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_is("amd")) {
      static const Kernels zen4 = zen4::with_pairs(avx512vnni::table);
      add(zen4);
    }
    if (has_vnni) add(avx512vnni::table);
    if (has_avx512) add(avx512::table);
    if (has_avx2) add(avx2::table);
#endif
    add(portable::table);
  }
};

const Choices& choices() {
  static const Choices found;
  return found;
}

std::atomic<const Kernels*> in_use{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* table = in_use.load(std::memory_order_acquire);
  return table ? *table : *choices().tables[0];
}

bool select(const char* name) {
  for (int i = 0; i < choices().count; i++) {
    if (std::strcmp(choices().names[i], name) == 0) {
      in_use.store(choices().tables[i], std::memory_order_release);
      return true;
    }
  }
  return false;
}

const char* const* available(int& count) {
  count = choices().count;
  return choices().names;
}

}  // namespace weft
