// Prints "name hex" for every entry and doorbell that GPUNetIO's writers make of known operands.
#include <cuda.h>

#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "device/doca_gpunetio_dev_verbs_common.cuh"
#include "device/doca_gpunetio_dev_verbs_qp.cuh"

namespace {

constexpr uint32_t kQpn = 0xabcdef, kLkeyBe = 0x44332211, kRkeyBe = 0x88776655;  // keys are stored swapped
constexpr uint64_t kRemote = 0x7e00aabbccdd, kLocal = 0x7f0011223344;
const auto kAlways = DOCA_GPUNETIO_IB_MLX5_WQE_CTRL_CQ_UPDATE;
doca_gpu_dev_verbs_wqe ring[2];

doca_gpu_dev_verbs_wqe* fresh() {
  memset(ring, 0xee, sizeof(ring));
  return ring;
}

void print(const char* name, const void* bytes, unsigned count) {
  printf("%s ", name);
  for (unsigned i = 0; i < count; ++i) printf("%02x", static_cast<const unsigned char*>(bytes)[i]);
  printf("\n");
}
void print_entry(const char* name) { print(name, ring, sizeof(ring)); }

}  // namespace

int main() {
  doca_gpu_dev_verbs_qp qp = {};
  qp.sq_num = kQpn, qp.sq_num_shift8 = kQpn << 8;
  qp.sq_num_shift8_be = __builtin_bswap32(kQpn << 8);
  qp.sq_num_shift8_be_1ds = __builtin_bswap32(kQpn << 8 | 1);
  qp.sq_num_shift8_be_2ds = __builtin_bswap32(kQpn << 8 | 2);
  qp.sq_num_shift8_be_3ds = __builtin_bswap32(kQpn << 8 | 3);
  qp.sq_num_shift8_be_4ds = __builtin_bswap32(kQpn << 8 | 4);
  qp.sq_num_shift8_be_5ds = __builtin_bswap32(kQpn << 8 | 5);

  doca_gpu_dev_verbs_wqe_prepare_nop(&qp, fresh(), 1, kAlways);
  print_entry("nop");
  doca_gpu_dev_verbs_wqe_prepare_write(&qp, fresh(), 2, DOCA_GPUNETIO_IB_MLX5_OPCODE_RDMA_WRITE, kAlways, 0, kRemote,
                                       kRkeyBe, kLocal, kLkeyBe, 4096);
  print_entry("write");
  doca_gpu_dev_verbs_wqe_prepare_write(&qp, fresh(), 0xffff, DOCA_GPUNETIO_IB_MLX5_OPCODE_RDMA_WRITE_IMM, kAlways,
                                       0x04030201, kRemote, kRkeyBe, kLocal, kLkeyBe, 4096);
  print_entry("write_imm");
  doca_gpu_dev_verbs_wqe_prepare_write(&qp, fresh(), 3, DOCA_GPUNETIO_IB_MLX5_OPCODE_RDMA_WRITE, kAlways, 0, kRemote,
                                       kRkeyBe, kLocal, kLkeyBe, 4096, kLocal + 4096, kLkeyBe, 100);
  print_entry("write_two");
  doca_gpu_dev_verbs_wqe_prepare_read(&qp, fresh(), 4, kAlways, kRemote, kRkeyBe, kLocal, kLkeyBe, 16);
  print_entry("read");
  doca_gpu_dev_verbs_wqe_prepare_atomic(&qp, fresh(), 5, DOCA_GPUNETIO_IB_MLX5_OPCODE_ATOMIC_FA, kAlways, kRemote,
                                        kRkeyBe, kLocal, kLkeyBe, 8, 5, 0);
  print_entry("fetch_add");
  doca_gpu_dev_verbs_wqe_prepare_atomic(&qp, fresh(), 6, DOCA_GPUNETIO_IB_MLX5_OPCODE_ATOMIC_CS, kAlways, kRemote,
                                        kRkeyBe, kLocal, kLkeyBe, 8, 0x0102030405060708, 0x99aabbccddeeff00);
  print_entry("compare_swap");
  const auto fa = DOCA_GPUNETIO_IB_MLX5_OPCODE_ATOMIC_MASKED_FA, cs = DOCA_GPUNETIO_IB_MLX5_OPCODE_ATOMIC_MASKED_CS;
  doca_gpu_dev_verbs_wqe_prepare_atomic_ext<DOCA_GPUNETIO_VERBS_ATOMIC_EXT_BYTES_4>(
      &qp, fresh(), ring + 1, 7, fa, kAlways, kRemote, kRkeyBe, kLocal, kLkeyBe, 5, 0, 0, 0, 0, 0);
  print_entry("masked_fetch_add_4");
  doca_gpu_dev_verbs_wqe_prepare_atomic_ext<DOCA_GPUNETIO_VERBS_ATOMIC_EXT_BYTES_8>(
      &qp, fresh(), ring + 1, 8, fa, kAlways, kRemote, kRkeyBe, kLocal, kLkeyBe, 0x0102030405060708, 0, 0, 0, 0, 0);
  print_entry("masked_fetch_add_8");
  doca_gpu_dev_verbs_wqe_prepare_atomic_ext<DOCA_GPUNETIO_VERBS_ATOMIC_EXT_BYTES_4>(
      &qp, fresh(), ring + 1, 9, cs, kAlways, kRemote, kRkeyBe, kLocal, kLkeyBe, 0, 0, 0x11111111, 0x22222222,
      0x33333333, 0x44444444);
  print_entry("masked_compare_swap_4");
  doca_gpu_dev_verbs_wqe_prepare_atomic_ext<DOCA_GPUNETIO_VERBS_ATOMIC_EXT_BYTES_8>(
      &qp, fresh(), ring + 1, 10, cs, kAlways, kRemote, kRkeyBe, kLocal, kLkeyBe, 0, 0, 0x1111111111111111,
      0x2222222222222222, 0x3333333333333333, 0x4444444444444444);
  print_entry("masked_compare_swap_8");
  doca_gpu_dev_verbs_wqe_prepare_dump(&qp, fresh(), 11, kAlways, kLocal, kLkeyBe, 8);
  print_entry("dump");
  const char text[] = "0123456789abcdefghijklmnopqr";
  for (unsigned count : {1u, 4u, 8u, 12u, 13u, 28u}) {
    doca_gpu_dev_verbs_wqe_prepare_write_inl(&qp, fresh(), 12, kAlways, kRemote, kRkeyBe,
                                             reinterpret_cast<uint64_t>(text), count);
    char name[32];
    snprintf(name, sizeof(name), "inline_%u", count);
    print_entry(name);
  }
  for (uint64_t next : {1ull, 0xffffull, 0x10000ull, 0x12345ull}) {
    char name[32];
    const uint32_t record = doca_gpu_dev_verbs_prepare_dbr(static_cast<uint32_t>(next));
    snprintf(name, sizeof(name), "record_%llx", static_cast<unsigned long long>(next));
    print(name, &record, 4);
    const uint64_t doorbell = doca_gpu_dev_common_prepare_db(qp.sq_num_shift8_be, next);
    snprintf(name, sizeof(name), "register_%llx", static_cast<unsigned long long>(next));
    print(name, &doorbell, 8);
  }
}
