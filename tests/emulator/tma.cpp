// The tensor memory accelerator: tensor maps, and copies of boxes that happen when they like.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "block.hpp"

namespace emu {
namespace {

constexpr int kRank = 4;
constexpr int kPanelBytes = 128;  // a row of a box
constexpr int kChunkBytes = 16;
constexpr uint32_t kMagic = 0x54534f52;

// What a CUtensorMap holds here.
struct TensorMap {
  uint32_t magic;
  int element_bytes;
  uint32_t box_rows;
  unsigned char* data;
  uint64_t extent[kRank];
  uint64_t stride[kRank];  // bytes
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

enum class CopyOf { kBox, kBytes, kSums };

struct Copy {
  CopyOf what = CopyOf::kBox;
  unsigned char* shared = nullptr;
  int bytes = 0;
  // A box.
  TensorMap map = {};
  std::array<int, kRank> at = {};
  // Bytes, or float32 numbers to add to.
  unsigned char* global = nullptr;

  Mbarrier* barrier = nullptr;  // of a load
  int thread = 0;               // of a store
  bool is_stored = false;       // already
  bool is_committed = false;
};

// Of fixed size: fibers do not allocate.
template <int kCapacity>
struct Copies {
  std::array<Copy, kCapacity> items;
  int count = 0;

  void add(const Copy& copy) {
    if (count == kCapacity) fail("TMA: too many copies are in flight for the emulator");
    items[count++] = copy;
  }
  Copy take(int i) {
    const Copy result = items[i];
    items[i] = items[--count];
    return result;
  }
};
// Of a block.
struct InFlight {
  Copies<256> loads;
  Copies<512> stores;
  // Shared memory as TMA and wgmma see it.
  alignas(16) unsigned char shared[256 * 1024];
};
std::array<InFlight, kMaxCluster> g_in_flight;
InFlight& in_flight() { return g_in_flight[Block::current_block().rank()]; }

// Not std::memcpy, which Thread Sanitizer intercepts.
void copy_words(unsigned char* to, const unsigned char* from, size_t bytes) {
  auto* target = reinterpret_cast<volatile uint64_t*>(to);
  auto* source = reinterpret_cast<const volatile uint64_t*>(from);
  for (size_t i = 0; i < bytes / sizeof(uint64_t); ++i) target[i] = source[i];
}

TensorMap read_map(const void* map) {
  TensorMap result;
  std::memcpy(&result, map, sizeof(result));
  if (result.magic != kMagic) fail("TMA: this is no tensor map");
  return result;
}

// Where row `row` of the box begins in global memory; null if there is no such row.
unsigned char* global_row(const Copy& copy, uint32_t row) {
  unsigned char* result = copy.map.data;
  for (int axis = 1; axis < kRank; ++axis) {
    const int64_t at = int64_t{copy.at[axis]} + (axis == 1 ? row : 0);
    if (at < 0 || at >= static_cast<int64_t>(copy.map.extent[axis])) return nullptr;
    result += at * static_cast<int64_t>(copy.map.stride[axis]);
  }
  return result;
}

// Calls visit(place in shared memory, place in global memory or null) for each element of the box.
template <class Element, class Visit>
void for_each_element(const Copy& copy, const Visit& visit) {
  const size_t first = copy.shared - shared_memory();
  for (uint32_t row = 0; row < copy.map.box_rows; ++row) {
    unsigned char* const global = global_row(copy, row);
    const size_t offset = first + row * kPanelBytes;
    for (int element = 0; element < kPanelBytes / static_cast<int>(sizeof(Element)); ++element) {
      const size_t byte = element * sizeof(Element);
      const size_t chunk = byte / kChunkBytes ^ (offset / kPanelBytes % 8);
      const int64_t column = int64_t{copy.at[0]} + element;
      const bool exists =
          global != nullptr && column >= 0 && column < static_cast<int64_t>(copy.map.extent[0]);
      visit(offset + chunk * kChunkBytes + byte % kChunkBytes,
            exists ? global + column * static_cast<int64_t>(sizeof(Element)) : nullptr);
    }
  }
}

void land_bytes(const Copy& copy) {
  const size_t first = copy.shared - shared_memory();
  copy_words(shared_memory() + first, copy.global, static_cast<size_t>(copy.bytes));
  copy_words(in_flight().shared + first, copy.global, static_cast<size_t>(copy.bytes));
}

template <class Element>
void land_box(const Copy& copy) {
  for_each_element<Element>(copy, [](size_t shared, const unsigned char* global) {
    Element value = 0;
    if (global != nullptr) std::memcpy(&value, global, sizeof(value));
    std::memcpy(shared_memory() + shared, &value, sizeof(value));
    std::memcpy(in_flight().shared + shared, &value, sizeof(value));
  });
}

void land(const Copy& copy) {
  if (copy.what == CopyOf::kBytes) {
    land_bytes(copy);
    return;
  }
  if (copy.map.element_bytes == 1) land_box<uint8_t>(copy);
  else land_box<uint16_t>(copy);
}

void add_sums(const Copy& copy) {
  const size_t first = copy.shared - shared_memory();
  auto* const sums = reinterpret_cast<float*>(copy.global);
  for (size_t i = 0; i < copy.bytes / sizeof(float); ++i) {
    float term;
    std::memcpy(&term, in_flight().shared + first + i * sizeof(float), sizeof(term));
    sums[i] += term;
  }
}

template <class Element>
void store_box(const Copy& copy) {
  for_each_element<Element>(copy, [](size_t shared, unsigned char* global) {
    if (global != nullptr) std::memcpy(global, in_flight().shared + shared, sizeof(Element));
  });
}

void store(const Copy& copy) {
  if (copy.what == CopyOf::kSums) {
    add_sums(copy);
    return;
  }
  if (copy.map.element_bytes == 1) store_box<uint8_t>(copy);
  else store_box<uint16_t>(copy);
}

CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                const cuuint64_t* extent, const cuuint64_t* stride, const cuuint32_t* box,
                const cuuint32_t* steps, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  const bool of_bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const int element_bytes = of_bytes ? 1 : 2;
  const bool known = (of_bytes || type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 ||
                      type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16) &&
                     rank == kRank && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
                     swizzle == CU_TENSOR_MAP_SWIZZLE_128B &&
                     fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  bool ok = known && reinterpret_cast<uintptr_t>(data) % 16 == 0 && data != nullptr &&
            box[0] * element_bytes == kPanelBytes && box[2] == 1 && box[3] == 1;
  for (int axis = 0; axis < kRank; ++axis) {
    ok = ok && extent[axis] >= 1 && extent[axis] <= uint64_t{1} << 32 && box[axis] >= 1 &&
         box[axis] <= 256 && steps[axis] == 1;
    if (axis == 0) continue;
    const uint64_t bytes = stride[axis - 1];
    // Of 0 nobody knows yet.
    ok = ok && bytes > 0 && bytes % 16 == 0 && bytes < uint64_t{1} << 40;
  }
  if (!ok) return CUDA_ERROR_INVALID_VALUE;
  TensorMap result{};
  result.magic = kMagic;
  result.element_bytes = element_bytes;
  result.box_rows = box[1];
  result.data = static_cast<unsigned char*>(data);
  for (int axis = 0; axis < kRank; ++axis) result.extent[axis] = extent[axis];
  for (int axis = 1; axis < kRank; ++axis) result.stride[axis] = stride[axis - 1];
  std::memset(map, 0, sizeof(*map));
  std::memcpy(map, &result, sizeof(result));
  return CUDA_SUCCESS;
}

Copy make_copy(const void* map, const int (&at)[kRank], const void* shared) {
  Copy result;
  result.map = read_map(map);
  result.at = {at[0], at[1], at[2], at[3]};
  result.shared = static_cast<unsigned char*>(const_cast<void*>(shared));
  result.bytes = static_cast<int>(result.map.box_rows) * kPanelBytes;
  check_shared("TMA", shared, result.bytes, kPanelBytes);
  return result;
}

Copy make_copy(CopyOf what, const void* global, const void* shared, int bytes) {
  if (reinterpret_cast<uintptr_t>(global) % kChunkBytes != 0 || bytes % kChunkBytes != 0) {
    fail("TMA: addresses and sizes of pieces are multiples of 16 bytes");
  }
  Copy result;
  result.what = what;
  result.global = static_cast<unsigned char*>(const_cast<void*>(global));
  result.shared = static_cast<unsigned char*>(const_cast<void*>(shared));
  result.bytes = bytes;
  check_shared("TMA", shared, bytes, kChunkBytes);
  return result;
}

void start_load(Copy copy, const uint64_t* barrier) {
  copy.barrier = reinterpret_cast<Mbarrier*>(const_cast<uint64_t*>(barrier));
  in_flight().loads.add(copy);
  if (Block::current_block().policy().looks_right) return;
  // From now on nobody may rely on what was here.
  for (unsigned char* bytes : {shared_memory(), in_flight().shared}) {
    volatile unsigned char* const target = bytes + (copy.shared - shared_memory());
    for (int i = 0; i < copy.bytes; ++i) target[i] = kPoison;
  }
}

void start_store(Copy copy) {
  copy.thread = Block::current_thread().index;
  copy.is_stored = Block::current().random() % 2 == 0;
  if (copy.is_stored) store(copy);
  in_flight().stores.add(copy);
}

}  // namespace

unsigned char* async_shared_memory() { return in_flight().shared; }

void reset_async_copies() {
  in_flight().loads.count = 0;
  in_flight().stores.count = 0;
  fence_proxy_async();
}

bool tma_loads_in_flight() { return in_flight().loads.count != 0; }

bool land_tma_load() {
  auto& loads = in_flight().loads;
  if (loads.count == 0) return false;
  Block& block = Block::current_block();
  const Copy copy = loads.take(static_cast<int>(block.random() % loads.count));
  land(copy);
  block.mbarrier_receive(*copy.barrier, copy.bytes);
  return true;
}

// What TMA brings and other blocks send comes at any time. False if there is nothing.
bool Block::land() {
  if (error_) return false;
  try {
    if (random_() % 2 == 0) return land_tma_load() || land_sent(rank_);
    return land_sent(rank_) || land_tma_load();
  } catch (...) {
    error_ = std::current_exception();
    return false;
  }
}

void check_async_copies() {
  const int loads = in_flight().loads.count;
  const int stores = in_flight().stores.count;
  if (loads != 0 || stores != 0) {
    throw Failure("emulated kernel, " + name_of_block() + " ended before " + std::to_string(loads) +
                  " TMA loads and " + std::to_string(stores) + " stores");
  }
}

void tma_load(void* shared, const void* map, const int (&at)[kRank], const uint64_t* barrier) {
  start_load(make_copy(map, at, shared), barrier);
}
void bulk_load(void* shared, const void* global, int bytes, const uint64_t* barrier) {
  start_load(make_copy(CopyOf::kBytes, global, shared, bytes), barrier);
}

void tma_store(const void* map, const int (&at)[kRank], const void* shared) {
  start_store(make_copy(map, at, shared));
}
void bulk_add(float* global, const float* shared, int bytes) {
  start_store(make_copy(CopyOf::kSums, global, shared, bytes));
}

void bulk_commit_group() {
  const int thread = Block::current_thread().index;
  auto& stores = in_flight().stores;
  for (int i = 0; i < stores.count; ++i) {
    if (stores.items[i].thread == thread) stores.items[i].is_committed = true;
  }
}

void bulk_wait_all_groups() {
  const int thread = Block::current_thread().index;
  auto& stores = in_flight().stores;
  for (int i = stores.count - 1; i >= 0; --i) {
    if (stores.items[i].thread != thread || !stores.items[i].is_committed) continue;
    const Copy copy = stores.take(i);
    if (!copy.is_stored) store(copy);
  }
}

void fence_proxy_async() {
  copy_words(in_flight().shared, shared_memory(), shared_memory_bytes() & ~size_t{7});
}

}  // namespace emu

// What kernels' host code asks of the CUDA runtime.
extern "C" {
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&emu::encode);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "an error of the emulated CUDA runtime"; }
}
