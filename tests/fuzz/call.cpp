#include "call.h"

#include <algorithm>
#include <cstring>

namespace fuzz {

namespace {

constexpr DLDataType kQTypes[] = {kFloat32, kFloat64, kFloat16, kBfloat16};
constexpr int64_t kLengths[] = {1, 0, 2, 3, 5, 7, 8, 9, 16, 17, 31, 33, 64, 65, 70, 130};
constexpr int64_t kColumns[] = {8, 1, 2, 3, 4, 7, 15, 16, 17, 24, 32, 33, 64, 65, 80, 128};
// What a call may cost: products of elements, so that a run takes milliseconds.
constexpr __int128 kMostWork = 1 << 15;

template <class Integer>
void change_number_at(void* at, Bytes& bytes) {
  auto& value = *static_cast<Integer*>(at);
  value = static_cast<Integer>(changed_integer(bytes, static_cast<int64_t>(value)));
}

}  // namespace

Slot& Call::add(const char* name, Role role, DLDataType dtype, std::initializer_list<int64_t> shape,
                bool present) {
  slots_.emplace_back(name, role, dtype, shape, present);
  return slots_.back();
}

const Slot* Call::find(const char* name) const {
  for (const Slot& slot : slots_) {
    if (std::strcmp(slot.name, name) == 0) return &slot;
  }
  return nullptr;
}

Slot& Call::slot(const char* name) { return const_cast<Slot&>(*find(name)); }

const DLTensor* Call::tensor(const char* name) const {
  const Slot* const found = find(name);
  return found == nullptr ? nullptr : found->given();
}

bool Call::has_argument(const std::string& word) const {
  const auto is = [&](const auto& argument) { return word == argument.name; };
  return std::any_of(slots_.begin(), slots_.end(), is) ||
         std::any_of(numbers_.begin(), numbers_.end(), is);
}

std::string Call::only_change() const {
  const bool one =
      !changes_.empty() && std::all_of(changes_.begin(), changes_.end(),
                                       [&](const auto& name) { return name == changes_[0]; });
  return one ? changes_[0] : "";
}

void Call::read_header(Bytes& bytes) {
  op_ = static_cast<Op>(bytes.below(4));
  batch_ = bytes.below(4);
  rows_ = bytes.one_of(kLengths);
  keys_ = bytes.one_of(kLengths);
  heads_k_ = 1 + bytes.below(3);
  heads_ = heads_k_ * (1 + bytes.below(3));
  columns_ = bytes.one_of(kColumns);
  columns_v_ = bytes.one_of(kColumns);
  dtype_ = bytes.one_of(kQTypes);
  features_ = bytes.take<uint32_t>();
  out_dtype_ = feature(0) ? kFloat32 : dtype_;
  small_dtype_ = bytes.one_of(kQTypes);
  if (!feature(1)) small_dtype_ = dtype_;
  packed_ = feature(2);
  seed_ = bytes.take<uint16_t>();
  values_ = bytes.below(4);
  block_ = 64 * (1 + bytes.below(2));
  page_ = int64_t{1} << bytes.below(7);
  if (!feature(3)) page_ = 0;
  new_rows_ = bytes.below(4);
  workspace_lacks_ = bytes.byte() > 240 ? 1 : 0;
  workspace_skew_ = bytes.byte();
  options_.window_left = bytes.below(8);
  options_.window_right = bytes.below(8);
}

uint64_t Call::scrambled_seed(const char* name) const {
  uint64_t hash = seed_ + 1;
  for (; *name != 0; ++name) hash = hash * 1099511628211u + static_cast<unsigned char>(*name);
  return hash;
}

Call::Call(const uint8_t* data, std::size_t size) {
  Bytes header(data, std::min(size, kHeader));
  read_header(header);
  switch (op_) {
    case Op::kForward:
      forward();
      break;
    case Op::kBackward:
      backward();
      break;
    case Op::kKvCache:
      kvcache();
      break;
    case Op::kMerge:
      merge();
      break;
  }
  numbers();
  options_.causal = feature(4);
  options_.has_window_left = feature(5);
  options_.has_window_right = feature(6);
  if (feature(7)) options_.softcap = 30.0;
  for (Slot& slot : slots_) {
    if (slot.rank() >= 2) slot.lay_out(static_cast<Layout>(header.below(kLayouts)));
  }
  Bytes changes(data + std::min(size, kHeader), size - std::min(size, kHeader));
  while (!changes.empty()) change(changes);
  for (Slot& slot : slots_) {
    if (!slot.allocate(kMostTensorBytes) && slot.present) lacks_memory_ = true;
    slot.fill(scrambled_seed(slot.name), values_);
  }
}

void Call::change(Bytes& bytes) {
  const int kind = bytes.below(kSlotChanges + 8);
  if (kind >= kSlotChanges) return change_number(bytes);
  Slot& slot = slots_[static_cast<std::size_t>(bytes.byte()) % slots_.size()];
  slot.change(kind, bytes);
  changes_.emplace_back(slot.name);
}

void Call::change_number(Bytes& bytes) {
  const Number& number = numbers_[static_cast<std::size_t>(bytes.byte()) % numbers_.size()];
  changes_.emplace_back(number.name);
  switch (number.type) {
    case Number::Type::kInt32:
      return change_number_at<int32_t>(number.at, bytes);
    case Number::Type::kInt64:
      return change_number_at<int64_t>(number.at, bytes);
    case Number::Type::kUInt64:
      return change_number_at<uint64_t>(number.at, bytes);
    case Number::Type::kSize:
      return change_number_at<std::size_t>(number.at, bytes);
    case Number::Type::kDouble:
      auto& value = *static_cast<double*>(number.at);
      value = changed_number(bytes);
  }
}

void Call::remember() {
  for (Slot& slot : slots_) slot.remember();
}

bool Call::all_unchanged() const {
  return std::all_of(slots_.begin(), slots_.end(), [](const Slot& s) { return s.unchanged(); });
}

std::string Call::wrongly_written() const {
  for (const Slot& slot : slots_) {
    if (slot.role == Role::kInput ? !slot.unchanged() : !slot.gaps_unchanged()) return slot.name;
  }
  return "";
}

bool Call::can_run() const {
  if (lacks_memory_) return false;
  __int128 work = 0;
  for (const Slot& slot : slots_) {
    if (slot.present) work += slot.elements();
  }
  const char* const queries = op_ == Op::kMerge ? "out_a" : "q";
  const char* const keys_of = op_ == Op::kKvCache ? "k_cache" : op_ == Op::kMerge ? "out_a" : "k";
  const Slot* const k = find(keys_of);
  __int128 keys = k->rank() >= 3 ? k->extent(k->rank() - 3) : 1;
  const Slot* const table = find("block_table");
  if (table != nullptr && table->present) keys *= table->extent(1);
  if (op_ != Op::kMerge) {
    work += static_cast<__int128>(find(queries)->elements()) * keys;
    work += static_cast<__int128>(find("out")->elements()) * keys;
  }
  return work <= kMostWork;
}

}  // namespace fuzz
