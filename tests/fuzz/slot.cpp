#include "slot.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>

namespace fuzz {

namespace {

constexpr DLDataType kTypes[] = {kFloat64, kFloat32, kFloat16, kBfloat16, kBool, kUInt8,
                                 kInt32,   kInt64,   kInt8,    kE4m3,     kE5m2};

// A page that can be neither read nor written.
unsigned char* forbidden() {
  static void* const page = mmap(nullptr, 1 << 16, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return static_cast<unsigned char*>(page) + 4096;
}

uint64_t scrambled(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// The exponents' lengths and biases.
struct Format {
  int mantissa;
  int exponent_of_one;
};

bool format_of(const DLDataType& type, Format& format) {
  if (type.code == kDLBfloat && type.bits == 16) return format = {7, 127}, true;
  if (type.code != kDLFloat) return false;
  if (type.bits == 64) return format = {52, 1023}, true;
  if (type.bits == 32) return format = {23, 127}, true;
  if (type.bits == 16) return format = {10, 15}, true;
  return false;
}

}  // namespace

Slot::Slot(const char* name_, Role role_, DLDataType dtype, std::initializer_list<int64_t> shape,
           bool present_)
    : name(name_), role(role_), present(present_), shape_(shape) {
  tensor_.dtype = dtype;
  tensor_.device = {kDLCPU, 0};
  tensor_.ndim = static_cast<int>(shape_.size());
  lay_out(Layout::kContiguous);
  no_strides_ = true;
}

void Slot::lay_out(Layout layout) {
  no_strides_ = layout == Layout::kNoStrides;
  const std::size_t rank = shape_.size();
  strides_.assign(rank, 0);
  std::vector<std::size_t> order(rank);
  std::iota(order.begin(), order.end(), 0);
  if (layout == Layout::kSwapped && rank > 1) std::swap(order[0], order[rank - 2]);
  int64_t step = 1;
  for (std::size_t i = rank; i-- > 0;) {
    if (layout == Layout::kSpread) step = 2 * step + 1;
    strides_[order[i]] = step;
    step *= std::max<int64_t>(shape_[order[i]], 1);
  }
  if (layout == Layout::kReversed) {
    for (int64_t& stride : strides_) stride = -stride;
  }
  if (layout == Layout::kBroadcast && role == Role::kInput && rank > 1) strides_[0] = 0;
  if (layout == Layout::kOffset) tensor_.byte_offset = static_cast<uint64_t>(item_bytes()) * 3;
}

void Slot::change(int kind, Bytes& bytes) {
  const auto axis = static_cast<std::size_t>(bytes.below(4));
  shape_.resize(std::max(shape_.size(), axis + 1), 1);
  strides_.resize(std::max(strides_.size(), axis + 1), 1);
  switch (kind) {
    case 0:
      tensor_.ndim = static_cast<int>(changed_integer(bytes, tensor_.ndim));
      return;
    case 1:
    case 2:
      shape_[axis] = changed_integer(bytes, shape_[axis]);
      return;
    case 3:
    case 4:
      no_strides_ = false;
      strides_[axis] = changed_integer(bytes, strides_[axis]);
      return;
    case 5:
      tensor_.dtype = bytes.one_of(kTypes);
      return;
    case 6:
      tensor_.dtype.code = bytes.byte();
      return;
    case 7:
      tensor_.dtype.bits = bytes.byte();
      tensor_.dtype.lanes = bytes.below(8) == 0 ? bytes.take<uint16_t>() : uint16_t{1};
      return;
    case 8:
      tensor_.device.device_type = static_cast<DLDeviceType>(changed_integer(bytes, kDLCPU));
      return;
    case 9:
      tensor_.device.device_id = static_cast<int>(changed_integer(bytes, 0));
      return;
    case 10:
      no_data_ = true;
      return;
    case 11:
      no_shape_ = true;
      return;
    case 12:
      tensor_.byte_offset = static_cast<uint64_t>(changed_integer(bytes, 0));
      return;
    case 13:
      skew_ = bytes.below(16);
      return;
    case 14:
      present = !present;
      return;
    default:
      pokes_.push_back({bytes.byte(), changed_integer(bytes, 1)});
  }
}

int Slot::item_bytes() const {
  return std::max(1, (tensor_.dtype.bits * tensor_.dtype.lanes + 7) / 8);
}

bool Slot::countable() const {
  return tensor_.ndim >= 0 && tensor_.ndim <= static_cast<int>(shape_.size()) && !no_shape_ &&
         std::all_of(shape_.begin(), shape_.begin() + tensor_.ndim,
                     [](int64_t n) { return n >= 0; });
}

int64_t Slot::elements() const {
  if (!countable()) return -1;
  int64_t count = 1;
  for (int i = 0; i < tensor_.ndim; ++i) {
    if (shape_[i] == 0) return 0;
  }
  for (int i = 0; i < tensor_.ndim; ++i) {
    if (__builtin_mul_overflow(count, shape_[i], &count)) return -1;
  }
  return count;
}

// The elements of the lowest and the highest address.
bool Slot::span(__int128& lowest, __int128& highest) const {
  lowest = highest = 0;
  if (elements() <= 0) return false;
  __int128 contiguous = 1;
  for (int i = tensor_.ndim - 1; i >= 0; --i) {
    const __int128 stride = no_strides_ ? contiguous : static_cast<__int128>(strides_[i]);
    const __int128 last = stride * (shape_[i] - 1);
    (last < 0 ? lowest : highest) += last;
    contiguous *= shape_[i];
  }
  return true;
}

bool Slot::allocate(std::size_t most_bytes) {
  const auto axes = static_cast<std::size_t>(std::clamp(tensor_.ndim, 0, kMostAxes));
  shape_.resize(std::max(shape_.size(), axes), 1);
  strides_.resize(std::max(strides_.size(), axes), 1);
  given_shape_ = std::make_unique<int64_t[]>(axes);
  given_strides_ = std::make_unique<int64_t[]>(axes);
  std::copy_n(shape_.begin(), axes, given_shape_.get());
  std::copy_n(strides_.begin(), axes, given_strides_.get());
  tensor_.shape = no_shape_ ? nullptr : given_shape_.get();
  tensor_.strides = no_strides_ ? nullptr : given_strides_.get();
  __int128 lowest = 0, highest = 0;
  const bool has_elements = span(lowest, highest);
  const __int128 bytes = has_elements ? (highest - lowest + 1) * item_bytes() + skew_ : 0;
  // A stride of 0 makes many elements of little memory.
  const bool fits = countable() && bytes <= static_cast<__int128>(most_bytes) && elements() >= 0 &&
                    elements() <= static_cast<int64_t>(most_bytes);
  first_ = forbidden();
  if (fits && has_elements) {
    memory_bytes_ = static_cast<std::size_t>(bytes);
    memory_ = std::make_unique<unsigned char[]>(memory_bytes_);
    first_ = memory_.get() + skew_ + static_cast<std::ptrdiff_t>(-lowest) * item_bytes();
  }
  // A hostile offset is far away: the sum is where the elements are all the same.
  const auto address = reinterpret_cast<std::uintptr_t>(first_) - tensor_.byte_offset;
  tensor_.data = no_data_ ? nullptr : reinterpret_cast<void*>(address);
  // What cannot be counted must be refused, wherever it lies.
  return fits || !countable();
}

template <class Function>
void Slot::for_each_element(const Function& function) const {
  const int64_t count = elements();
  const int bytes = item_bytes();
  for (int64_t index = 0; index < count; ++index) {
    int64_t rest = index, offset = 0, contiguous = 1;
    for (int i = tensor_.ndim - 1; i >= 0; --i) {
      offset += rest % shape_[i] * (no_strides_ ? contiguous : strides_[i]);
      contiguous *= shape_[i];
      rest /= shape_[i];
    }
    function(index, first_ + offset * bytes);
  }
}

void Slot::fill_item(unsigned char* item, uint64_t random, int kind) const {
  const DLDataType& type = tensor_.dtype;
  Format format{};
  uint64_t bits = random;
  const int width = item_bytes();
  if (type.code == kDLBool) {
    bits = kind == 3 ? random & 0xff : random & 1;
  } else if (type.code == kDLInt && type.bits > 8) {
    bits = 0;
  } else if (kind == 0 && format_of(type, format)) {  // 1/8 to 4, either sign
    const uint64_t exponent = static_cast<uint64_t>(format.exponent_of_one) - 3 + random % 5;
    const uint64_t mantissa = (random >> 8) & ((uint64_t{1} << format.mantissa) - 1);
    bits = (exponent << format.mantissa) | mantissa;
    bits |= (random >> 4 & 1) << (type.bits - 1);
  } else if (kind == 1) {
    bits = 0;
  } else if (kind == 2 && format_of(type, format)) {  // NaN, infinities, the largest number
    const int exponent_bits = type.bits - 1 - format.mantissa;
    const uint64_t infinity = ((uint64_t{1} << exponent_bits) - 1) << format.mantissa;
    const uint64_t special[] = {infinity + 1, infinity, infinity | uint64_t{1} << (type.bits - 1),
                                infinity - 1};
    bits = random % 8 < 4 ? special[random % 4] : random;
  }
  std::memcpy(item, &bits, static_cast<std::size_t>(std::min(width, 8)));
}

void Slot::fill(uint64_t seed, int kind) {
  if (memory_ == nullptr) return;
  for (std::size_t i = 0; i < memory_bytes_; ++i) {
    memory_[i] = static_cast<unsigned char>(scrambled(seed + i));
  }
  const int bytes = item_bytes();
  for_each_element([&](int64_t index, unsigned char* item) {
    fill_item(item, scrambled(seed ^ (static_cast<uint64_t>(index) << 20)), kind);
    if (tensor_.dtype.code == kDLInt && tensor_.dtype.bits == 32 &&
        index < static_cast<int64_t>(integers.size())) {
      std::memcpy(item, &integers[static_cast<std::size_t>(index)], sizeof(int32_t));
    }
    for (const Pokes& poke : pokes_) {
      if (poke.index == index) {
        std::memcpy(item, &poke.value, static_cast<std::size_t>(std::min(bytes, 8)));
      }
    }
  });
}

std::vector<unsigned char> Slot::memory_copy() const {
  return {memory_.get(), memory_.get() + memory_bytes_};
}

bool Slot::gaps_unchanged() const {
  if (memory_ == nullptr) return true;
  std::vector<bool> is_element(memory_bytes_);
  const auto bytes = static_cast<std::size_t>(item_bytes());
  for_each_element([&](int64_t, const unsigned char* item) {
    const auto at = static_cast<std::size_t>(item - memory_.get());
    std::fill_n(is_element.begin() + static_cast<std::ptrdiff_t>(at), bytes, true);
  });
  for (std::size_t i = 0; i < memory_bytes_; ++i) {
    if (!is_element[i] && memory_[i] != before_[i]) return false;
  }
  return true;
}

}  // namespace fuzz
