// The native calls that targets in front of the engine make.
#pragma once

#include "fuzz.hpp"
#include "soft_hca.hpp"

EW_API int ew_hca_create(u32 flags, ew_hca** out);
EW_API int ew_hca_destroy(ew_hca* hca);
EW_API int ew_hca_pd(ew_hca* hca, u32* pd);
EW_API int ew_hca_wake_fd(ew_hca* hca);
EW_API int ew_hca_register(ew_hca* hca, u32 pd, u64 addr, u64 num_bytes, u32 access, u32* key);
EW_API int ew_hca_poll(ew_hca* hca, u32 max_wqes);
EW_API int ew_window_create(ew_hca* hca, ew_window** out);
EW_API void ew_window_destroy(ew_window* window);
EW_API int ew_window_fd(ew_window* window);
EW_API int ew_window_publish(ew_window* window, u32 key, u32 fd_idx, u64 fd_offset, u32* rkey);
EW_API int ew_window_post_recv(ew_window* window, u32 count);
EW_API int ew_window_poll_recv(ew_window* window, u8* cqe);
EW_API u64 ew_window_wire_id(ew_window* window, u8* secret);
EW_API int ew_peer_import(ew_hca* hca, int window_fd, int wake_fd, const int* fds, u32 num_fds, ew_peer** out);
EW_API int ew_peer_destroy(ew_peer* peer);
EW_API int ew_qp_create(ew_hca* hca, u32 pd, u32 num_wqe, u32 num_cqe, u32 cq_flags, const ew_qp_memory* memory,
                        ew_qp** out, ew_qp_info* info);
EW_API int ew_qp_connect(ew_qp* qp, ew_peer* peer, u32 remote_qpn);
EW_API void ew_qp_indices(ew_qp* qp, u64* pi, u64* ci);
EW_API void ew_qp_destroy(ew_qp* qp);
EW_API int ew_wire_open(u32 flags, const char* library, const char* address, u64 ack_timeout_ns, u64 max_peer_bytes,
                        u64 max_held_bytes, ew_hca** out);
EW_API int ew_wire_connect(ew_hca* hca, ew_window* window, const u8* address, u32 num_bytes, u64 wire_id,
                           const u8* secret, ew_peer** out);
EW_API void ew_wire_counters(ew_hca* hca, u64 out[5]);
