#include "options.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>

#include "option_names.h"

namespace anyflash::python {

namespace {

void pad_rank(TensorView& view, int rank) {
  const int missing = rank - view.rank;
  if (missing <= 0) return;
  for (int i = rank - 1; i >= 0; --i) {
    view.shape[i] = i < missing ? 1 : view.shape[i - missing];
    view.stride[i] = i < missing ? 0 : view.stride[i - missing];
  }
  view.rank = rank;
}

template <class T, class U>
void read_pair(nb::handle value, T& first, U& second) {
  const auto pair = nb::cast<nb::tuple>(value);
  first = nb::cast<T>(pair[0]);
  second = nb::cast<U>(pair[1]);
}

void read_dropout(nb::handle value, ForwardOptions& options) {
  const auto triple = nb::cast<nb::tuple>(value);
  options.dropout_p = nb::cast<double>(triple[0]);
  options.seed = nb::cast<std::uint64_t>(triple[1]);
  options.offset = nb::cast<std::uint64_t>(triple[2]);
}

// (query_start, key_start, diagonal, batch_start, head_start, total_heads); the first three may be
// None.
void read_part(nb::handle value, ForwardOptions& options) {
  const auto part = nb::cast<nb::tuple>(value);
  const auto read = [&](std::size_t i, std::optional<std::int64_t>& field) {
    if (!part[i].is_none()) field = nb::cast<std::int64_t>(part[i]);
  };
  read(0, options.query_start);
  read(1, options.key_start);
  read(2, options.diagonal);
  options.batch_start = nb::cast<std::int64_t>(part[3]);
  options.head_start = nb::cast<std::int64_t>(part[4]);
  options.total_heads = nb::cast<std::int64_t>(part[5]);
}

// (first, rows, begin, end)
void read_dq_sums_rows(nb::handle value, BackwardOptions& options) {
  const auto rows = nb::cast<nb::tuple>(value);
  options.dq_sums_first = nb::cast<std::int64_t>(rows[0]);
  options.dq_sums_rows = nb::cast<std::int64_t>(rows[1]);
  options.dq_sums_begin = nb::cast<bool>(rows[2]);
  options.dq_sums_end = nb::cast<bool>(rows[3]);
}

void read_number(const char* name, nb::handle value, ForwardOptions& options) {
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("window")) {
    read_pair(value, options.window_left, options.window_right);
  } else if (is("block_size")) {
    read_pair(value, options.block_size[0], options.block_size[1]);
  } else if (is("max_seqlen")) {
    read_pair(value, options.max_seqlen_q, options.max_seqlen_k);
  } else if (is("dropout")) {
    read_dropout(value, options);
  } else if (is("part")) {
    read_part(value, options);
  } else if (is("softcap")) {
    options.softcap = nb::cast<double>(value);
  } else if (is("validate")) {
    options.validate = nb::cast<bool>(value);
  } else {
    throw std::logic_error(std::string("unknown option ") + name);
  }
}

void read_number(const char* name, nb::handle value, BackwardOptions& options) {
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("deterministic")) {
    options.deterministic = nb::cast<bool>(value);
  } else if (is("accumulate_dq")) {
    options.accumulate_dq = nb::cast<bool>(value);
  } else if (is("accumulate_dkv")) {
    options.accumulate_dkv = nb::cast<bool>(value);
  } else if (is("dq_sums_rows")) {
    read_dq_sums_rows(value, options);
  } else {
    throw std::logic_error(std::string("unknown option ") + name);
  }
}

void read_number(const char* name, nb::handle value, KvCacheOptions& options) {
  const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
  if (is("rotary_interleaved")) {
    options.rotary_interleaved = nb::cast<bool>(value);
  } else if (is("num_splits")) {
    options.num_splits = nb::cast<std::int64_t>(value);
  } else if (is("split_size")) {
    options.split_size = nb::cast<std::int64_t>(value);
  } else if (is("head_dim_v")) {
    options.head_dim_v = nb::cast<std::int64_t>(value);
  } else {
    throw std::logic_error(std::string("unknown option ") + name);
  }
}

template <class Options, std::size_t n>
void read_all(const nb::dict& given, const TensorOption<Options> (&tensors)[n], Options& options,
              std::vector<Array>& arrays) {
  arrays.reserve(given.size());  // the options point to elements
  for (const auto [key, value] : given) {
    const char* const name = nb::cast<const char*>(key);
    const auto* const tensor =
        std::find_if(std::begin(tensors), std::end(tensors),
                     [&](const auto& option) { return option.name == name; });
    if (tensor == std::end(tensors)) {
      read_number(name, value, options);
      continue;
    }
    const auto pair = nb::cast<nb::tuple>(value);
    arrays.push_back(
        import_array(pair[0], name, nb::cast<std::uint8_t>(pair[1]), tensor->writable));
    pad_rank(arrays.back().view, tensor->rank);
    options.*tensor->field = &arrays.back().view;
  }
}

}  // namespace

void read_options(const nb::dict& given, ForwardOptions& options, std::vector<Array>& arrays) {
  read_all(given, kForwardTensors, options, arrays);
}

void read_options(const nb::dict& given, BackwardOptions& options, std::vector<Array>& arrays) {
  read_all(given, kBackwardTensors, options, arrays);
}

void read_options(const nb::dict& given, KvCacheOptions& options, std::vector<Array>& arrays) {
  read_all(given, kKvCacheTensors, options, arrays);
}

}  // namespace anyflash::python
