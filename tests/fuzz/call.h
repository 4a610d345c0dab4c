// A call of the C ABI as a fuzzer's bytes describe it: one that is allowed, and then changes.
//
// The first kHeader bytes say which function, sizes, types and features (seeds.py writes them from
// the tests' tables of cases); every change after them takes a few more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "anyflash/anyflash.h"
#include "slot.h"

namespace fuzz {

enum class Op { kForward, kBackward, kKvCache, kMerge };

inline constexpr std::size_t kHeader = 48;
inline constexpr std::size_t kMostTensorBytes = std::size_t{1} << 15;
inline constexpr std::size_t kMostWorkspaceBytes = std::size_t{1} << 24;

// A number among the options.
struct Number {
  enum class Type { kInt32, kInt64, kUInt64, kDouble, kSize };
  const char* name;
  Type type;
  void* at;
};

class Call {
 public:
  Call(const uint8_t* data, std::size_t size);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  static inline long calls = 0;  // of the C ABI

  // The function that says how much workspace is needed; merge_states has none: 0 bytes.
  anyflash_status workspace_size(std::size_t* bytes) const;
  anyflash_status run(void* workspace, std::size_t bytes) const;

  // What the call was made of is allowed, unless something was changed.
  bool is_changed() const { return !changes_.empty(); }
  // The one argument that was changed, if it is one; else an empty string.
  std::string only_change() const;
  bool has_argument(const std::string& word) const;

  // Whether it is safe (every tensor has memory) and short enough to be run.
  bool can_run() const;
  void remember();
  bool all_unchanged() const;
  // After a call that succeeded: inputs are unchanged, and nothing beside elements was written.
  std::string wrongly_written() const;
  // How many bytes the workspace lacks, and by how many it misses its alignment.
  std::size_t workspace_lacks() const { return workspace_lacks_; }
  std::size_t workspace_skew() const { return workspace_skew_; }

 private:
  Slot& add(const char* name, Role role, DLDataType dtype, std::initializer_list<int64_t> shape,
            bool present = true);
  bool feature(int bit) const { return (features_ >> bit & 1) != 0; }
  const DLTensor* tensor(const char* name) const;
  Slot& slot(const char* name);
  const Slot* find(const char* name) const;

  void read_header(Bytes& bytes);
  void forward();
  void backward();
  void kvcache();
  void cache_tokens();
  void cache_integers();
  void merge();
  void forward_options();
  void packed_lengths();
  void small_tensors();
  void numbers();
  void change(Bytes& bytes);
  void change_number(Bytes& bytes);
  uint64_t scrambled_seed(const char* name) const;
  anyflash_forward_options forward_options_given() const;
  anyflash_backward_options backward_options_given() const;
  anyflash_kvcache_options cache_options_given() const;

  Op op_ = Op::kForward;
  int64_t batch_ = 1, rows_ = 1, keys_ = 1, heads_ = 1, heads_k_ = 1, columns_ = 1, columns_v_ = 1;
  int64_t total_q_ = 0, total_k_ = 0;
  DLDataType dtype_ = kFloat32, out_dtype_ = kFloat32, small_dtype_ = kFloat32;
  DLDataType cache_dtype_ = kFloat32;
  uint32_t features_ = 0;
  bool packed_ = false;
  int64_t page_ = 0, new_rows_ = 0, block_ = 64;
  uint64_t seed_ = 0;
  int values_ = 0;
  std::size_t workspace_lacks_ = 0, workspace_skew_ = 0;
  bool lacks_memory_ = false;

  std::deque<Slot> slots_;
  std::vector<Number> numbers_;
  std::vector<std::string> changes_;
  anyflash_forward_options options_ = ANYFLASH_FORWARD_OPTIONS_INIT;
  anyflash_backward_options backward_options_ = ANYFLASH_BACKWARD_OPTIONS_INIT;
  anyflash_kvcache_options cache_options_ = ANYFLASH_KVCACHE_OPTIONS_INIT;
  anyflash_merge_options merge_options_ = ANYFLASH_MERGE_OPTIONS_INIT;
};

}  // namespace fuzz
