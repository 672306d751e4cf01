// Integers that wrap around, as PyTorch's do; C++ leaves what signed ones do undefined. For the GPU and the CPU.
#pragma once
#include "multiattn/ptx.cuh"

namespace multiattn {

template <class T>
struct Unsigned;
template <>
struct Unsigned<int32> {
  using Type = uint32;
};
template <>
struct Unsigned<int64> {
  using Type = uint64;
};

template <class T>
DEVICE T wrapping_add(T x, T y) {
  using U = typename Unsigned<T>::Type;
  return static_cast<T>(static_cast<U>(x) + static_cast<U>(y));
}
template <class T>
DEVICE T wrapping_sub(T x, T y) {
  using U = typename Unsigned<T>::Type;
  return static_cast<T>(static_cast<U>(x) - static_cast<U>(y));
}
template <class T>
DEVICE T wrapping_mul(T x, T y) {
  using U = typename Unsigned<T>::Type;
  return static_cast<T>(static_cast<U>(x) * static_cast<U>(y));
}

}  // namespace multiattn
