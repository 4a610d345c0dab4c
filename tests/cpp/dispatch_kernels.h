// Descriptors for the tests of dispatch: named fields of kernels that do nothing.
#pragma once

#include <climits>

#include "kernel_descriptor.h"

namespace anyflash {

constexpr KernelFamily family_of(const char* name, ComputeCapabilities gpus, int priority = 0,
                                 bool arch_specific = false) {
  KernelFamily family;
  family.name = name;
  family.gpus = gpus;
  family.priority = priority;
  family.arch_specific = arch_specific;
  return family;
}
constexpr KernelFamily kCpuFamily = family_of("cpu", {});
constexpr KernelFamily kSm80Family = family_of("sm80", {80, INT_MAX});
// One that a later GPU alone has, and that it prefers where the scale is positive.
constexpr KernelFamily kSm90Family = [] {
  KernelFamily family = family_of("sm90", {90, 90}, 1, true);
  family.needs_positive_scale = true;
  return family;
}();

constexpr KernelDescriptor sm80_kernel(const char* name, int head_dim, int head_dim_v,
                                       unsigned features, std::size_t smem_bytes,
                                       Op op = Op::kForward) {
  KernelDescriptor d;
  d.name = name;
  d.family = &kSm80Family;
  d.op = op;
  d.dtype = DType::kFloat16;
  d.head_dim = head_dim;
  d.head_dim_v = head_dim_v;
  d.features = features;
  d.smem_bytes = smem_bytes;
  return d;
}

constexpr KernelDescriptor bfloat16_kernel(const char* name) {
  KernelDescriptor d = sm80_kernel(name, 64, 64, kNoFeatures, 40000);
  d.dtype = DType::kBFloat16;
  return d;
}

constexpr KernelDescriptor sm90_kernel(const char* name, int head_dim, std::size_t smem_bytes) {
  KernelDescriptor d = sm80_kernel(name, head_dim, head_dim, kNoFeatures, smem_bytes);
  d.family = &kSm90Family;
  return d;
}

constexpr KernelDescriptor config_kernel(const char* name, int ctas, std::size_t smem_bytes) {
  KernelDescriptor kernel = sm80_kernel(name, 256, 256, kNoFeatures, smem_bytes, Op::kBackward);
  kernel.tile.ctas = ctas;
  return kernel;
}

constexpr KernelDescriptor decode_kernel(const char* name, int head_dim, int block_m,
                                         unsigned features, std::size_t smem_bytes) {
  KernelDescriptor kernel =
      sm80_kernel(name, head_dim, head_dim, features, smem_bytes, Op::kDecode);
  kernel.tile.block_m = block_m;
  return kernel;
}

constexpr KernelDescriptor latent_kernel(const char* name, int block_m, std::size_t smem_bytes) {
  KernelDescriptor kernel = decode_kernel(name, 320, block_m, kNoFeatures, smem_bytes);
  kernel.head_dim_v = 256;
  kernel.latent = true;
  return kernel;
}

constexpr KernelDescriptor tile_kernel(const char* name, int head_dim, int block_m,
                                       std::size_t smem_bytes, int ctas = 1) {
  KernelDescriptor kernel = sm80_kernel(name, head_dim, head_dim, kNoFeatures, smem_bytes);
  kernel.tile.block_m = block_m;
  kernel.tile.ctas = ctas;
  return kernel;
}

constexpr KernelDescriptor other_bits_kernel(const char* name, int head_dim, int block_m,
                                             std::size_t smem_bytes) {
  KernelDescriptor kernel = tile_kernel(name, head_dim, block_m, smem_bytes);
  kernel.bits_group = 1;
  return kernel;
}

constexpr unsigned kScores = kSoftcap | kAlibi;

constexpr KernelDescriptor cpu_kernel(const char* name, Op op, CpuIsa isa = CpuIsa::kBaseline,
                                      DType dtype = DType::kFloat32) {
  KernelDescriptor d;
  d.name = name;
  d.family = &kCpuFamily;
  d.isa = isa;
  d.op = op;
  d.dtype = dtype;
  d.features = kAllFeatures;
  return d;
}

}  // namespace anyflash
