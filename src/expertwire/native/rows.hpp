// Element-wise row arithmetic of the CPU target, with the processor's widest safe instructions.
#pragma once

namespace ew {

// sum[i] += weight * row[begin + i] for i < count, or sum[i] = ... if `first`; row elements of
// DataType `type` (fp32, bf16, fp16).
void row_add_scaled(float* sum, const void* row, unsigned type, float weight, unsigned long long begin,
                    unsigned long long count, bool first);
// row[begin + i] = round-to-nearest-even(sum[i]).
void row_store(void* row, unsigned type, const float* sum, unsigned long long begin, unsigned long long count);

}  // namespace ew
