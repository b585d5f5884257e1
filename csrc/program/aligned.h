// Memory that grows and begins at a multiple of 64 bytes. What it held is lost when it grows. Much of it is asked for in large pages: which
// small ones the system hands out, and so where they fall in the caches, made the same prefill up to 7% slower from one start to the next.
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
      // Twice as much as before, as far as nobody pays for it: steps that grow row by row took new pages one after the other.
      const std::size_t asked = static_cast<std::size_t>(size) * sizeof(Type), before = static_cast<std::size_t>(size_) * sizeof(Type);
      const std::size_t needed = asked >= large_page ? std::max(asked, 2 * before) : asked;
      const std::size_t alignment = asked >= large_page ? large_page : 64;
      const std::size_t bytes = (needed + alignment - 1) / alignment * alignment;
      std::free(data_);
      data_ = nullptr;
      size_ = 0;
      data_ = static_cast<Type*>(std::aligned_alloc(alignment, bytes));
      if (!data_) throw std::bad_alloc();
#if defined(__linux__)
      if (alignment == large_page) madvise(data_, bytes, MADV_HUGEPAGE);   // a wish: without large pages all works as well
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
