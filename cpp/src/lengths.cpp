// The elements of cu_seqlens_q, cu_seqlens_k, seqused_k, query_starts, key_starts and diagonals,
// and those of a cache's integers, cu_seqlens_k_new among them. A GPU's kernels clamp lengths to
// what the tensors hold (variant/sequence.h, variant/cache.h); here they are refused.
#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <string>
#include <vector>

#include "arguments.h"
#include "device.h"
#include "validate.h"

namespace anyflash {

namespace {

// max_seqlen_q or max_seqlen_k: the limit of a sequence of a tensor.
struct Bound {
  const char* option;
  int64_t given;  // 0: not
  const char* tensor;
  int64_t rows;  // of the tensor

  int64_t most() const { return longest_of(given, rows); }
};

// What makes the text where it is wanted: a call that is right allocates nothing.
auto text_of_limit(const Bound& bound) {
  return [bound] {
    const auto& [option, given, tensor, rows] = bound;
    return given != 0 ? std::string(option) + " is " + std::to_string(given)
                      : std::string(tensor) + " has " + std::to_string(rows) + " rows";
  };
}

std::string at(const char* argument, int64_t index) {
  return std::string(argument) + "[" + std::to_string(index) + "]";
}

// `rows` is what the tensor has. No length is over `most`; limit() says where that comes from.
template <class Limit>
void check_cumulative(const int32_t* cu, const char* argument, int64_t batch, int64_t rows,
                      const char* tensor, int64_t most, const Limit& limit) {
  if (cu[0] != 0) {
    invalid_value(at(argument, 0) + " is " + std::to_string(cu[0]) + "; it must be 0");
  }
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t length = int64_t{cu[i + 1]} - cu[i];
    if (length < 0) {
      invalid_value(at(argument, i + 1) + " is " + std::to_string(cu[i + 1]) + ", less than " +
                    at(argument, i) + ", " + std::to_string(cu[i]) + "; it must not decrease");
    }
    if (length > most) {
      invalid_value("sequence " + std::to_string(i) + " of " + argument + " has length " +
                    std::to_string(length) + "; " + limit());
    }
  }
  if (cu[batch] != rows) {
    invalid_value(at(argument, batch) + " is " + std::to_string(cu[batch]) +
                  "; it must be the number of rows of " + tensor + ", " + std::to_string(rows));
  }
}

void check_cumulative(const int32_t* cu, const char* argument, int64_t batch, const Bound& bound) {
  check_cumulative(cu, argument, batch, bound.rows, bound.tensor, bound.most(),
                   text_of_limit(bound));
}

void check_used(const int32_t* used, const int32_t* cu_k, int64_t batch, int64_t seqlen_k) {
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t keys = cu_k == nullptr ? seqlen_k : int64_t{cu_k[i + 1]} - cu_k[i];
    if (used[i] >= 0 && used[i] <= keys) continue;
    invalid_value(at("seqused_k", i) + " is " + std::to_string(used[i]) +
                  "; 0 to the sequence's number of keys, " + std::to_string(keys) + ", is allowed");
  }
}

// With dropout, starts of keys are multiples of 8.
void check_positions(const int32_t* positions, const char* argument, int64_t batch, int64_t least,
                     int multiple = 1) {
  if (positions == nullptr) return;
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t x = positions[i];
    if (x >= least && x <= kMaxPosition && x % multiple == 0) continue;
    invalid_value(at(argument, i) + " is " + std::to_string(x) + "; " + std::to_string(least) +
                  " to " + std::to_string(kMaxPosition) +
                  (multiple == 1 ? "" : ", with dropout a multiple of 8,") + " is allowed");
  }
}

// Elements that the host can read: those of the CPU as they are, those of a GPU copied.
class HostCopy {
 public:
  HostCopy(const int32_t* data, int64_t count, const Device& device, void* stream) : data_(data) {
    if (data == nullptr || count == 0 || device.type == DeviceType::kCpu) return;
    if (is_capturing(device.index, stream)) {  // to wait for it would invalidate the capture
      invalid_value(
          "validate is set, but the stream is being captured into a CUDA graph: lengths cannot be "
          "read then; capture without validate");
    }
    copy_.resize(static_cast<std::size_t>(count));
    copy_to_host(device.index, copy_.data(), data, copy_.size() * sizeof(int32_t), stream);
    data_ = copy_.data();
  }
  const int32_t* data() const { return data_; }

 private:
  const int32_t* data_;
  std::vector<int32_t> copy_;
};

// Of one that is not within 0 to `most`. `what` says what `most` is.
[[noreturn]] void invalid_element(const char* argument, int64_t index, int64_t value, int64_t most,
                                  const std::string& what) {
  const std::string allowed = most < 0 ? "none" : "0 to " + std::to_string(most);
  invalid_value(at(argument, index) + " is " + std::to_string(value) + "; " + allowed +
                " is allowed: " + what);
}

bool is_within(int64_t value, int64_t most) { return value >= 0 && value <= most; }

// The rows [first, last) of the cache that a sequence uses.
struct UsedRows {
  int64_t first;
  int64_t last;
};

class CacheLengths {
 public:
  CacheLengths(const AppendParams& params, int64_t max_seqlen_q, const Device& device, void* stream)
      : a_(params),
        p_(params.cache),
        device_(device),
        stream_(stream),
        seqlens_(p_.cache_seqlens, p_.attention.batch, device, stream),
        leftpad_(p_.cache_leftpad, p_.attention.batch, device, stream),
        places_(p_.cache_batch_idx, p_.attention.batch, device, stream),
        rotations_(a_.rotary_seqlens, p_.attention.batch, device, stream),
        cu_q_(p_.attention.cu_seqlens_q, p_.attention.batch + 1, device, stream),
        cu_new_(p_.cu_seqlens_k_new, p_.attention.batch + 1, device, stream) {
    const Attention& a = p_.attention;
    if (cu_q_.data() != nullptr) {
      check_cumulative(cu_q_.data(), "cu_seqlens_q", a.batch,
                       {"max_seqlen_q", max_seqlen_q, "q", a.total_q});
    }
    if (cu_new_.data() != nullptr) {
      check_cumulative(cu_new_.data(), cu_new_name(), a.batch, p_.total_new, "k_new", a.seqlen_k,
                       [this] { return room_text(); });
    }
  }

  void check(int64_t index) const {
    const UsedRows rows = used_rows(index);
    if (places_.data() != nullptr && !is_within(places_.data()[index], p_.slots - 1)) {
      invalid_element("cache_batch_idx", index, places_.data()[index], p_.slots - 1,
                      "the sequences of k_cache");
    }
    if (p_.block_table != nullptr) check_pages(index, rows);
    if (a_.rotary_cos.data != nullptr) check_rotary(index, rows);
  }

 private:
  int64_t seqlen_q(int64_t index) const {
    if (cu_q_.data() == nullptr) return p_.attention.seqlen_q;
    return int64_t{cu_q_.data()[index + 1]} - cu_q_.data()[index];
  }
  int64_t seqlen_new(int64_t index) const {
    if (cu_new_.data() == nullptr) return p_.seqlen_new;
    return int64_t{cu_new_.data()[index + 1]} - cu_new_.data()[index];
  }

  UsedRows used_rows(int64_t index) const {
    const int64_t appended = seqlen_new(index);
    const int64_t room = int64_t{p_.attention.seqlen_k} - appended;
    int64_t filled = room;
    int64_t first = 0;
    if (seqlens_.data() != nullptr) {
      filled = seqlens_.data()[index];
      if (!is_within(filled, room)) {
        invalid_element("cache_seqlens", index, filled, room,
                        room_text() + ", and " + appended_text(appended));
      }
    }
    if (leftpad_.data() != nullptr) {
      first = leftpad_.data()[index];
      if (!is_within(first, filled)) {
        const bool all = seqlens_.data() == nullptr;
        invalid_element("cache_leftpad", index, first, filled,
                        all ? room_text() : "the rows that are filled, of cache_seqlens");
      }
    }
    return {first, filled + appended};
  }

  void check_pages(int64_t index, const UsedRows& rows) const {
    if (rows.last <= rows.first) return;
    const int64_t first = rows.first >> p_.page_shift;
    const int64_t last = (rows.last - 1) >> p_.page_shift;
    const int64_t step = p_.block_table_stride.col;
    // Of the entries in use, which may run backwards, the one of the lowest address.
    const int64_t lowest = std::min(first * step, last * step);
    const int32_t* const entries = p_.block_table + index * p_.block_table_stride.batch + lowest;
    const HostCopy copy(entries, (last - first) * std::abs(step) + 1, device_, stream_);
    for (int64_t page = first; page <= last; ++page) {
      const int32_t entry = copy.data()[page * step - lowest];
      if (entry >= 0 && entry < p_.slots) continue;
      invalid_value("block_table[" + std::to_string(index) + ", " + std::to_string(page) + "] is " +
                    std::to_string(entry) + "; k_cache has " + std::to_string(p_.slots) + " pages");
    }
  }

  void check_rotary(int64_t index, const UsedRows& rows) const {
    const int64_t appended = seqlen_new(index);
    const int64_t queries = seqlen_q(index);
    const int64_t before = rows.last - appended - rows.first;
    const int64_t of_q = a_.rotary_steps ? queries : std::min<int64_t>(queries, 1);
    const int64_t count = std::max<int64_t>(appended, of_q);
    if (rotations_.data() != nullptr) {
      const int64_t most = a_.rotary_rows - std::max<int64_t>(count, 1);
      if (is_within(rotations_.data()[index], most)) return;
      invalid_element("rotary_seqlens", index, rotations_.data()[index], most,
                      "rotary_cos has " + std::to_string(a_.rotary_rows) + " rows, " +
                          appended_text(appended) + ", and " + queries_text(queries));
    }
    const int64_t needed = before + count;
    if (needed <= a_.rotary_rows) return;
    invalid_value("rotary_cos has " + std::to_string(a_.rotary_rows) + " rows; sequence " +
                  std::to_string(index) + " needs " + std::to_string(needed) + ": " +
                  filled_text(before) + ", " + appended_text(appended) + ", and " +
                  queries_text(queries));
  }

  std::string room_text() const {
    return room_of(p_.block_table != nullptr, p_.attention.seqlen_k);
  }

  // Texts of counts, with the arguments that they come from.
  std::string filled_text(int64_t filled) const {
    const std::string pad = leftpad_.data() == nullptr ? "" : ", cache_leftpad";
    return std::to_string(filled) + " keys are in the cache (" +
           (seqlens_.data() == nullptr ? "k_cache" : "cache_seqlens") + pad + ")";
  }
  std::string appended_text(int64_t appended) const {
    return std::to_string(appended) + " are appended (" +
           (cu_new_.data() == nullptr ? "k_new" : cu_new_name()) + ")";
  }
  std::string queries_text(int64_t queries) const {
    const std::string count = std::to_string(queries);
    return cu_q_.data() == nullptr ? "q has seqlen_q " + count
                                   : count + " are queries (cu_seqlens_q)";
  }
  const char* cu_new_name() const {
    const bool of_q = p_.cu_seqlens_k_new == p_.attention.cu_seqlens_q;
    return of_q ? "cu_seqlens_q" : "cu_seqlens_k_new";
  }

  const AppendParams& a_;
  const KvCacheParams& p_;
  const Device& device_;
  void* stream_;
  HostCopy seqlens_;
  HostCopy leftpad_;
  HostCopy places_;
  HostCopy rotations_;
  HostCopy cu_q_;
  HostCopy cu_new_;
};

}  // namespace

void check_lengths(const Attention& attention, const LongestSequences& longest,
                   const Device& device, void* stream) {
  const int64_t batch = attention.batch;
  const HostCopy cu_q(attention.cu_seqlens_q, batch + 1, device, stream);
  const HostCopy cu_k(attention.cu_seqlens_k, batch + 1, device, stream);
  const HostCopy used(attention.seqused_k, batch, device, stream);
  if (cu_q.data() != nullptr) {
    check_cumulative(cu_q.data(), "cu_seqlens_q", batch,
                     {"max_seqlen_q", longest.q, "q", attention.total_q});
    check_cumulative(cu_k.data(), "cu_seqlens_k", batch,
                     {"max_seqlen_k", longest.k, "k", attention.total_k});
  }
  if (used.data() != nullptr) check_used(used.data(), cu_k.data(), batch, attention.seqlen_k);
  const Part& part = attention.part;
  const HostCopy queries(part.query_start.array, batch, device, stream);
  const HostCopy keys(part.key_start.array, batch, device, stream);
  const HostCopy diagonals(part.diagonal.array, batch, device, stream);
  check_positions(queries.data(), "query_starts", batch, 0);
  check_positions(keys.data(), "key_starts", batch, 0, attention.dropout_threshold != 0 ? 8 : 1);
  check_positions(diagonals.data(), "diagonals", batch, -kMaxPosition);
}

void check_kvcache_lengths(const AppendParams& params, int64_t max_seqlen_q, const Device& device,
                           void* stream) {
  const CacheLengths lengths(params, max_seqlen_q, device, stream);
  for (int64_t i = 0; i < params.cache.attention.batch; ++i) lengths.check(i);
}

}  // namespace anyflash
