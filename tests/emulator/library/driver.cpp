// Runs a plan of the forward, backward or decoding on the emulated GPU and compares with float64.
// It is the program behind the sanitizer and mutation tests, where Python cannot be the host.
//
//   emulated_driver [--stop] < cases        one case a line:
//   dtype batch seqlen_q seqlen_k heads heads_k head_dim head_dim_v causal scale seed key=value ...
//
// dtype is fp16 or bf16, causal 0 or 1, seed decides values and the emulator's schedule. Keys:
//   left, right         window                  softcap         sink=1     a logit for each head
//   alibi=SLOPE         of the first head       shared_slopes=1            slopes of all sequences
//   dropout=P           out=fp32   type of the output
//   diagonal=N          query 0 and key N are on it
//   split=N             the keys from N on in a second call, which continues the first; out=fp32
//   merge=N             the keys from N on in a second call; both results are merged
//   bias=TYPE           fp32, fp16, bf16 (a tenth and every seventh key -inf) or bool
//   bias_axes=bhqk      with 1 for each axis that is broadcast
//   block=ROWS,KEYS     random block mask       used=N,N,...    seqused_k
//   ranges=SIZE,N       key_ranges of documents, the next head's one larger; with N=2 a key is also
//                       seen by the next document but one
//   cu_q=0,N,... cu_k=  packed sequences; seqlen_q and seqlen_k are the totals, batch is not read
//   nan=hidden          NaN in K and V of the keys that no query sees
//   nan=seen            and NaN and infinity at random places of V
//   schedule=N          of the emulator, instead of the seed's
//   smem=BYTES          of shared memory that a block may have, instead of the A100's
//   gpu=90              compute capability      multiprocessors=N
//
// op=backward runs the backward instead, on the out and LSE of the reference. nan=hidden is also in
// q and dout of the queries that see no key; nan=q, k, v or dout also in one place of each of its
// heads.
//   nan=hiding          -inf in a place of K, which hides the key
//   det=1               deterministic           dlse=1       a gradient of the LSE
//   dout=fp32           type of dout            grad=fp32    type of dq, dk and dv
//   accumulate=1        dq, dk and dv are added to; grad=fp32
//   small=TYPE          of the other gradients, which are made where their tensors are; none: none
//   keyless=1           LSE of some rows is infinite, as of rows that see no key
// It prints each gradient's deviation and a digest of its bits.
//
// op=decode runs a KvCachePlan; seqlen_k is the cache's capacity. Rows of the cache that
// no query sees are NaN, and those of no sequence must not be touched at all. Of the keys above,
// windows, softcap, alibi, sink, out and schedule are allowed.
//   filled=N,N,...      cache_seqlens           leftpad=N,N,...
//   batch_idx=1         the sequences' order in the cache is not that of the batch
//   page=N              page size, pages in random order; hole=1: the first one does not exist
//   new=N               keys to append          rotary=N    columns of them, and of q; halves=1
//   rotary_seqlens=N,N,...
//   cache=TYPE          int8, e4m3 or e5m2      scales=head, slot or row
//   splits=N            split_size=N            tree=1      a random tree
//   nan=seen            NaN and infinity at random places of V
//   latent=1            V is the first columns of K; nan=seen: NaN in keys that not all queries see
//   ragged=1            queries and new keys are packed, as if their numbers differed
//
// Exit status 0: all cases are right. --stop: nothing is run after the first wrong one.
#include <array>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <string>

#include "case.h"
#include "check.h"
#include "decode_call.h"
#include "decode_check.h"
#include "decode_problem.h"
#include "emu.hpp"
#include "gradient_reference.h"
#include "gradients.h"
#include "inputs.h"
#include "problem.h"
#include "reference.h"

// device_emulated.cpp
extern "C" void emulated_set_compute_capability(int value);
extern "C" void emulated_set_multiprocessors(int value);

namespace driver {
namespace {

// Of all runs. All four halves count.
std::array<uint64_t, 2> rng_of(const Case& c) {
  return {0x0123456789abcdefu * (c.seed + 1u), 0xfedcba9876543210u + c.seed};
}

double run_forward_case(const Case& c) {
  const auto rng = rng_of(c);
  Problem p(c);
  if (!c.nan.empty()) put_nan(p, rng, c.nan == "seen");
  run_forward(p, rng);
  return check_forward(p, Reference(p, rng));
}

double run_backward_case(const Case& c) {
  const auto rng = rng_of(c);
  Problem p(c);
  Gradients g(p);
  if (c.nan == "hiding") {
    put_hiding_infinity(p);
  } else if (!c.nan.empty()) {
    put_nan(p, rng, false);
    put_nan_of_rows(p, g, Reference(p, rng));
    if (c.nan != "hidden") put_one_nan(p, g, c.nan);
  }
  const Reference forward(p, rng);
  set_forward(p, forward);
  constexpr double kBefore = 2;
  if (c.accumulate) {
    for (Tensor* t : {&g.dq, &g.dk, &g.dv}) fill(*t, 0, t->size(), kBefore);
  }
  run_backward(p, g, rng);
  if (c.accumulate) add(g, -kBefore);
  const auto report = [](const std::string& name, const Tensor& tensor, double deviation) {
    std::printf("  %s %.3f %016llx", name.c_str(), deviation,
                static_cast<unsigned long long>(tensor.digest()));
  };
  const double worst = check_backward(g, GradientReference(p, g, forward), report);
  std::printf("\n");
  return worst;
}

double run_decode_case(const Case& c) {
  DecodeProblem p(c);
  const CacheValues expected(p);
  p.forbid_unused();
  run_decode(p);
  p.allow_unused();
  return check_decode(p, expected);
}

double run(const Case& c) {
  emu::options().seed = c.schedule >= 0 ? static_cast<unsigned>(c.schedule) : c.seed;
  emu::options().shared_memory_limit = c.smem;
  emulated_set_compute_capability(c.gpu);
  emulated_set_multiprocessors(c.multiprocessors);
  if (c.decode) return run_decode_case(c);
  return c.backward ? run_backward_case(c) : run_forward_case(c);
}

// Whether the line's case is right.
bool run_line(const std::string& line, const Case& c) {
  try {
    const double worst = run(c);
    std::printf("%s %s: %.3f of the allowed error\n", worst <= 1 ? "ok   " : "WRONG", line.c_str(),
                worst);
    return worst <= 1;
  } catch (const std::exception& error) {
    std::printf("WRONG %s: %s\n", line.c_str(), error.what());
    return false;
  }
}

}  // namespace
}  // namespace driver

int main(int count, char** arguments) {
  const bool stop = count > 1 && std::string(arguments[1]) == "--stop";
  int wrong = 0;
  std::string line;
  while (std::getline(std::cin, line) && !(stop && wrong > 0)) {
    try {
      if (!driver::run_line(line, driver::Case(line))) ++wrong;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "not a case: %s: %s\n", line.c_str(), error.what());
      return 2;
    }
  }
  return wrong == 0 ? 0 : 1;
}
