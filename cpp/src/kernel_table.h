// All kernels of this build, and which of them runs a problem.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "anyflash/options.h"
#include "anyflash/tensor_view.h"
#include "device.h"
#include "kernel_descriptor.h"

namespace anyflash {

// Defined in the generated kernel_table.cpp (cmake/kernels.cmake).
extern const KernelUnit* const kKernelUnits[];
extern const std::size_t kKernelUnitCount;
// "sm_80" and "sm_90a" for machine code, "compute_80" for PTX; ends with a null pointer.
extern const char* const kCudaArchs[];
// Architectures that a family of kernels has code for and no other GPU runs, whether they are built
// or not, as ANYFLASH_ARCHS has them: "90a". Ends with a null pointer.
extern const char* const kSpecificArchs[];

// -- registry.cpp: what there is

// In the table's order.
const std::vector<const KernelDescriptor*>& all_kernels();
// A call looks at those for its operation and type alone: all are many.
const std::vector<const KernelDescriptor*>& gpu_kernels(Op op, DType dtype);
const std::vector<const KernelDescriptor*>& cpu_kernels(Op op, DType dtype);

void count_launch(const KernelDescriptor& kernel);
std::uint64_t launches_of(const KernelDescriptor& kernel);

// The best instruction set that is built and that this machine has.
CpuIsa best_isa();

const char* name(Op op);                   // "forward"
const char* name(TileConfig tile_config);  // "compact"; the default one: ""
// Names of a set of features: "softcap", ...
std::vector<std::string> feature_names(unsigned features);

// -- dispatch.cpp: which kernel runs

// What the choice depends on.
struct Problem {
  Op op;
  Device device;
  DType dtype;
  int head_dim;  // of q and k
  int head_dim_v;
  unsigned features;  // bits of Feature
  CpuIsa cpu_isa;
  // Of queries; decode: those that share the keys of a head; backward: keys.
  int64_t rows = 0;
  int64_t pairs = 0;     // of batch and head; backward: and key head and part of its group
  bool bounded = false;  // a mask hides keys: causal, or a window
  bool positive_scale = true;
  bool latent = false;  // decode: the values are the first columns of the keys
  // Decode: the rows are of long sequences, with tensors as `prefill` kernels take them.
  bool prefill = false;
  // The cache is unpaged, or has pages of at least 8 rows and no left padding; positive strides.
  bool cache_in_boxes = false;
};

// The problem of a call whose parameters are valid.
Problem problem_of(Op op, const TensorView& q, const Attention& attention, CpuIsa cpu_isa);
Problem problem_of(const TensorView& q, const KvCacheParams& params, CpuIsa cpu_isa);

// The kernel that runs the problem; throws Error, which says what was built.
const KernelDescriptor& select_kernel(const Problem& problem);
const KernelDescriptor& select_cpu_kernel(const Problem& problem);  // select_cpu.cpp
const KernelDescriptor& select_gpu_kernel(const Problem& problem);  // select_gpu.cpp

// -- built_archs.cpp: for which GPUs there is code

// True if this build holds machine code, or PTX to be compiled, for the compute capability (80
// = 8.0): of any family, or of one.
bool built_for(int compute_capability);
bool built_for(const KernelFamily& family, int compute_capability);
// Throws Error if CUDA device `index` cannot run this build's code.
void check_built_for(int index);

}  // namespace anyflash
