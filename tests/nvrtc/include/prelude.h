// Before every unit: what <cmath> gives them, and structured bindings of constant tuples. For the
// latter CUTLASS declares std::tuple_size for NVRTC, but not of constants.
#pragma once

#include <cmath>

namespace std {

template <class...>
struct tuple_size;
// T where it is a tuple: structs without tuple_size are bound by their members.
template <class T, decltype(sizeof(0)) = tuple_size<T>::value>
using Tuple = T;
template <class T>
struct tuple_size<const Tuple<T>> : tuple_size<T> {};

template <decltype(sizeof(0)) I, class...>
struct tuple_element;
template <decltype(sizeof(0)) I, class T>
struct tuple_element<I, const T> {
  using type = const typename tuple_element<I, T>::type;
};

}  // namespace std
