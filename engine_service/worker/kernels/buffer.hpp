// Page-aligned memory from the operating system, zeroed, without copies.
// Must not know: what it holds.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include <sys/mman.h>

namespace tokenwire {

// Owns `size` numbers of type T. Fresh memory comes from the operating system as zero pages, which take
// no room until they are written.
template <class T>
class Buffer {
public:
    Buffer() = default;
    explicit Buffer(size_t size) { resize(size); }
    ~Buffer() { release(); }
    Buffer(Buffer&& other) noexcept { swap(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        swap(other);
        return *this;
    }

    T* data() { return data_; }
    const T* data() const { return data_; }
    size_t size() const { return size_; }
    size_t bytes() const { return size_ * sizeof(T); }
    T& operator[](size_t i) { return data_[i]; }
    const T& operator[](size_t i) const { return data_[i]; }

    // Room for `size` zeroed numbers; what was held is lost. Throws std::bad_alloc.
    void resize(size_t size) {
        release();
        if (size == 0) return;
        void* memory = mmap(nullptr, size * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<T*>(memory);
        size_ = size;
    }

    // At least `size` numbers; grows by half again at a time. Contents are zeroed when it grows.
    void reserve(size_t size) {
        if (size > size_) resize(size + size / 2);
    }

private:
    void release() {
        if (data_ != nullptr) munmap(data_, size_ * sizeof(T));
        data_ = nullptr;
        size_ = 0;
    }
    void swap(Buffer& other) {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
    }

    T* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace tokenwire
