// Words for error messages.
#pragma once

#include <string>
#include <vector>

#include "anyflash/tensor_view.h"

namespace anyflash {

const char* name(DType dtype);                              // "float16"
std::string name(const Device& device);                     // "cpu", "cuda:0"
std::string shape_of(const TensorView& t);                  // "(2, 128, 8, 64)"
std::string listed(const std::vector<std::string>& names);  // "a, b and c"
int bytes_of(DType dtype);
bool is_float(DType dtype);
inline constexpr char kLsesAllowed[] = "it must be float32 or, on the CPU, float64";
inline constexpr char kFloatsAllowed[] = "float64, float32, float16 and bfloat16 are allowed";

}  // namespace anyflash
