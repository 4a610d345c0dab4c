// Reads files of the safetensors format: 8 bytes with the length of a JSON header, the header, and
// the tensors' bytes, little-endian and contiguous.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

// A float32 tensor of the file.
struct Weight {
  std::vector<int64_t> shape;
  std::vector<float> data;
};

struct SafeTensors {
  std::map<std::string, Weight> weights;
  std::map<std::string, std::string> metadata;  // "__metadata__": strings
};

// Throws std::runtime_error for files that are not of the format, or hold other types than F32.
SafeTensors read_safetensors(const std::string& path);
