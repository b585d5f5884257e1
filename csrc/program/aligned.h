// Memory that can grow, aligned to 64 bytes. Its content is lost when it grows. Large allocations ask for huge pages.
// With small pages, the physical addresses and so the cache sets changed from start to start, and the same prefill was
// up to 7% slower.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace weft {

constexpr std::size_t large_page = 2 << 20;

template <typename Type>
class Aligned {
 public:
  Aligned() = default;
  Aligned(Aligned&& other) noexcept : data_(other.data_), size_(other.size_) {
    other.data_ = nullptr;
    other.size_ = 0;
  }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  Aligned& operator=(Aligned&&) = delete;
  ~Aligned() { std::free(data_); }

  Type* at_least(int64_t size) {
    if (size > size_) {
      // A large allocation at least doubles. If it grew row by row, each step would fault in new pages. Pages that are
      // never touched cost nothing.
      const std::size_t requested = static_cast<std::size_t>(size) * sizeof(Type), before = static_cast<std::size_t>(size_) * sizeof(Type);
      const std::size_t needed = requested >= large_page ? std::max(requested, 2 * before) : requested;
      const std::size_t alignment = requested >= large_page ? large_page : 64;
      const std::size_t bytes = (needed + alignment - 1) / alignment * alignment;
      std::free(data_);
      data_ = nullptr;
      size_ = 0;
      data_ = static_cast<Type*>(std::aligned_alloc(alignment, bytes));
      if (!data_) throw std::bad_alloc();
#if defined(__linux__)
      if (alignment == large_page) madvise(data_, bytes, MADV_HUGEPAGE);   // only a hint: small pages work too
#endif
      size_ = static_cast<int64_t>(bytes / sizeof(Type));
    }
    return data_;
  }
  Type* data() const { return data_; }

 private:
  Type* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace weft
