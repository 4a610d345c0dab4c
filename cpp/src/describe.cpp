#include "describe.h"

namespace anyflash {

const char* name(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return "float64";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
  }
  return "unknown";
}

std::string name(const Device& device) {
  return device.type == DeviceType::kCpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

std::string shape_of(const TensorView& t) {
  std::string text = "(";
  for (int i = 0; i < t.rank; ++i) text += (i == 0 ? "" : ", ") + std::to_string(t.shape[i]);
  return text + (t.rank == 1 ? ",)" : ")");
}

int bytes_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
  }
  return 0;
}

}  // namespace anyflash
