// Memory that grows and begins at a multiple of 64 bytes. What it held is lost when it grows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace weft {

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
      std::free(data_);
      data_ = nullptr;
      size_ = 0;
      const std::size_t bytes = (static_cast<std::size_t>(size) * sizeof(Type) + 63) / 64 * 64;
      data_ = static_cast<Type*>(std::aligned_alloc(64, bytes));
      if (!data_) throw std::bad_alloc();
      size_ = size;
    }
    return data_;
  }
  Type* data() const { return data_; }

 private:
  Type* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace weft
