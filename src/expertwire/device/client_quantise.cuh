// Quantise: rows of the model's type -> e4m3 with a scale per block, before they are packed.
#pragma once

#include "client_state.cuh"
#include "fp8.cuh"

struct ClientQuantiseArgs {
  u64 hidden;         // [num_tokens] rows, hidden_stride bytes apart
  u64 hidden_stride;
  u64 rows;           // out: e4m3 [num_tokens][hidden_size]
  u64 scales;         // out: fp32 [num_tokens][ceil(hidden_size / scale_block)]
  u32 num_tokens, hidden_size, data_type, scale_block;
};

// A warp takes a block of a row.
EW_KERNEL(client_quantise, ClientQuantiseArgs) {
  const u32 blocks = ceil_div(args.hidden_size, args.scale_block);
  for (u64 item = global_warp(); item < static_cast<u64>(args.num_tokens) * blocks; item += all_warps()) {
    const u64 token = item / blocks, first = item % blocks * args.scale_block;
    const float scale = warp_quantise(at<u8>(args.rows + token * args.hidden_size),
                                      at<const u8>(args.hidden + token * args.hidden_stride), args.data_type, first,
                                      min_u64(first + args.scale_block, args.hidden_size));
    if (lane_id() == 0) at<float>(args.scales)[item] = scale;
  }
}
