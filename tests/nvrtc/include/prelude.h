// Before every unit: what <cmath> gives them, and structured bindings of constant tuples. For the
// latter CUTLASS declares std::tuple_size for NVRTC, but not of constants.
#pragma once

#include <cmath>

namespace std {

template <class...>
struct tuple_size;
template <class T>
struct tuple_size<const T> : tuple_size<T> {};

template <decltype(sizeof(0)) I, class...>
struct tuple_element;
template <decltype(sizeof(0)) I, class T>
struct tuple_element<I, const T> {
  using type = const typename tuple_element<I, T>::type;
};

}  // namespace std
