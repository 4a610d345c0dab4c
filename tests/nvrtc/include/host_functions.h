// Before the units of sm90: host functions of other units that their launches call. Taken as device
// functions, and without -rdc, they need a body. It does nothing.
#pragma once

namespace anyflash {

struct Attention;
struct BackwardScratch;
struct CombineParams;

decltype(sizeof(0)) key_range_bounds_bytes(const Attention&) { return 0; }
void make_key_range_bounds(const Attention&, void*, unsigned*) {}
void backward_preprocess(const BackwardScratch&, void*) {}
void sum_dalibi_slopes(const BackwardScratch&, void*) {}
void sum_dsinks(const BackwardScratch&, void*) {}
void combine_splits(const CombineParams&, void*) {}

}  // namespace anyflash
