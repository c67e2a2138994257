// Memory aligned for vectors, in huge pages where the system gives them.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "kernel.h"

namespace cinetile {

class AlignedBuffer {
 public:
  explicit AlignedBuffer(size_t bytes) {
    constexpr size_t kHugePage = size_t{2} << 20;
    const size_t alignment = bytes >= kHugePage ? kHugePage : kAlignment;
    const size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    data_ = std::aligned_alloc(alignment, rounded);
    if (data_ == nullptr) throw std::bad_alloc();
#ifdef __linux__
    // Only a wish: fewer misses of the address translation where the system can grant it.
    if (alignment == kHugePage) madvise(data_, rounded, MADV_HUGEPAGE);
#endif
  }
  ~AlignedBuffer() { std::free(data_); }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_;
};

}  // namespace cinetile
