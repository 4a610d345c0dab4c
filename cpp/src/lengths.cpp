// The elements of cu_seqlens_q, cu_seqlens_k and seqused_k. A GPU's kernels clamp them to what the
// tensors hold (variant/sequence.h); here they are refused.
#include <cstddef>
#include <string>
#include <vector>

#include "arguments.h"
#include "device.h"
#include "validate.h"

namespace anyflash {

namespace {

std::string at(const char* argument, int64_t index) {
  return std::string(argument) + "[" + std::to_string(index) + "]";
}

// `rows` is what the tensor has, `bound` the option `bound_name`.
void check_cumulative(const int32_t* cu, const char* argument, int64_t batch, int64_t rows,
                      const char* tensor, int64_t bound, const char* bound_name) {
  if (cu[0] != 0) {
    invalid_value(at(argument, 0) + " is " + std::to_string(cu[0]) + "; it must be 0");
  }
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t length = int64_t{cu[i + 1]} - cu[i];
    if (length < 0) {
      invalid_value(at(argument, i + 1) + " is " + std::to_string(cu[i + 1]) + ", less than " +
                    at(argument, i) + ", " + std::to_string(cu[i]) + "; it must not decrease");
    }
    if (length > bound) {
      invalid_value("sequence " + std::to_string(i) + " of " + argument + " has length " +
                    std::to_string(length) + "; " + bound_name + " is " + std::to_string(bound));
    }
  }
  if (cu[batch] != rows) {
    invalid_value(at(argument, batch) + " is " + std::to_string(cu[batch]) +
                  "; it must be the number of rows of " + tensor + ", " + std::to_string(rows));
  }
}

void check_used(const int32_t* used, const int32_t* cu_k, int64_t batch, int64_t seqlen_k) {
  for (int64_t i = 0; i < batch; ++i) {
    const int64_t keys = cu_k == nullptr ? seqlen_k : int64_t{cu_k[i + 1]} - cu_k[i];
    if (used[i] >= 0 && used[i] <= keys) continue;
    invalid_value(at("seqused_k", i) + " is " + std::to_string(used[i]) +
                  "; 0 to the sequence's number of keys, " + std::to_string(keys) + ", is allowed");
  }
}

// Elements that the host can read: those of the CPU as they are, those of a GPU copied.
class HostCopy {
 public:
  HostCopy(const int32_t* data, int64_t count, const Device& device, void* stream) : data_(data) {
    if (data == nullptr || count == 0 || device.type == DeviceType::kCpu) return;
    copy_.resize(static_cast<std::size_t>(count));
    copy_to_host(device.index, copy_.data(), data, copy_.size() * sizeof(int32_t), stream);
    data_ = copy_.data();
  }
  const int32_t* data() const { return data_; }

 private:
  const int32_t* data_;
  std::vector<int32_t> copy_;
};

}  // namespace

void check_lengths(const ForwardParams& params, const ForwardOptions& options,
                   const Device& device) {
  const int64_t batch = params.batch;
  const HostCopy cu_q(params.cu_seqlens_q, batch + 1, device, options.stream);
  const HostCopy cu_k(params.cu_seqlens_k, batch + 1, device, options.stream);
  const HostCopy used(params.seqused_k, batch, device, options.stream);
  if (cu_q.data() != nullptr) {
    check_cumulative(cu_q.data(), "cu_seqlens_q", batch, params.total_q, "q", options.max_seqlen_q,
                     "max_seqlen_q");
    check_cumulative(cu_k.data(), "cu_seqlens_k", batch, params.total_k, "k", options.max_seqlen_k,
                     "max_seqlen_k");
  }
  if (used.data() != nullptr) check_used(used.data(), cu_k.data(), batch, params.seqlen_k);
}

}  // namespace anyflash
