/* libmlx5's own post_send and poll_cq on rings that the caller owns: no device, no kernel module.
 *
 * Compiled together with qp.c and cq.c of rdma-core's mlx5 provider (libmlx5.py). What opening a
 * device would fill in is filled in here, only as far as these two paths look at it.
 */
#include <config.h>

#include <infiniband/driver.h>
#include <stdio.h>
#include <stdlib.h>

#include "mlx5.h"

int mlx5_freeze_on_error_cqe = 0; /* a variable of mlx5.c */

#define MAX_SGE 8

struct queue_memory { /* addresses in this process */
	uint64_t sq, dbrec, doorbell, cq, cq_dbrec;
	uint32_t qpn, num_wqe, num_cqe, blue_flame;
};

struct request {
	uint64_t id, remote_addr, compare_add, swap;
	uint32_t opcode, flags, rkey, imm_be, num_sge, reserved;
	struct ibv_sge sge[MAX_SGE];
};

struct completion {
	uint64_t id;
	uint32_t status, vendor_err, opcode, byte_len, imm_be, qpn, flags, reserved;
};

struct oracle {
	struct mlx5_context context;
	struct mlx5_qp qp;
	struct mlx5_cq cq;
	struct mlx5_bf bf;
	struct ibv_device device;
};

static void make_queue(struct mlx5_wq *wq, uint32_t num_wqe)
{
	wq->wqe_cnt = wq->max_post = num_wqe;
	wq->max_gs = wq->qp_state_max_gs = MAX_SGE;
	wq->wqe_shift = 6;
	wq->wrid = calloc(num_wqe, sizeof(*wq->wrid));
	wq->wqe_head = calloc(num_wqe, sizeof(*wq->wqe_head));
	wq->wr_data = calloc(num_wqe, sizeof(*wq->wr_data));
}

struct oracle *oracle_open(const struct queue_memory *memory)
{
	struct oracle *o = calloc(1, sizeof(*o));
	struct mlx5_qp *qp = &o->qp;
	struct ibv_context *context = &o->context.ibv_ctx.context;
	uint32_t slot = memory->qpn >> MLX5_UIDX_TABLE_SHIFT;

	context->device = &o->device;
	o->context.cqe_version = 1; /* completions name the queue by its user index, as IBGDA's do */
	o->context.dbg_fp = fopen("/dev/null", "w");
	o->context.uidx_table[slot].refcnt = 1;
	o->context.uidx_table[slot].table = calloc(MLX5_UIDX_TABLE_MASK + 1, sizeof(void *));
	o->context.uidx_table[slot].table[memory->qpn & MLX5_UIDX_TABLE_MASK] = &qp->rsc;

	o->cq.verbs_cq.cq.context = context;
	o->cq.verbs_cq.cq.cqe = memory->num_cqe - 1;
	o->cq.active_buf = &o->cq.buf_a;
	o->cq.buf_a.buf = (void *)(uintptr_t)memory->cq;
	o->cq.cqe_sz = 64;
	o->cq.dbrec = (void *)(uintptr_t)memory->cq_dbrec;

	o->bf.reg = (void *)(uintptr_t)memory->doorbell;
	o->bf.buf_size = 256;
	o->bf.uuarn = memory->blue_flame;
	o->context.prefer_bf = memory->blue_flame;

	qp->rsc.type = MLX5_RSC_TYPE_QP;
	qp->rsc.rsn = memory->qpn;
	qp->ibv_qp = &qp->verbs_qp.qp;
	qp->verbs_qp.qp.context = context;
	qp->verbs_qp.qp.qp_num = memory->qpn;
	qp->verbs_qp.qp.qp_type = IBV_QPT_RC;
	qp->verbs_qp.qp.send_cq = qp->verbs_qp.qp.recv_cq = &o->cq.verbs_cq.cq;
	qp->max_inline_data = 1008;
	qp->atomics_enabled = 1;
	qp->bf = &o->bf;
	qp->db = (void *)(uintptr_t)memory->dbrec;
	qp->sq_start = (void *)(uintptr_t)memory->sq;
	make_queue(&qp->sq, memory->num_wqe);
	qp->sq.qend = (char *)qp->sq_start + (memory->num_wqe << 6);
	make_queue(&qp->rq, 64);
	return o;
}

/* As if everything below `index` had been posted and completed. */
void oracle_advance(struct oracle *o, uint32_t index)
{
	o->qp.sq.cur_post = index;
}

/* One call of post_send with a chain of requests. Returns its error number. */
int oracle_post(struct oracle *o, const struct request *requests, uint32_t count)
{
	struct ibv_send_wr *chain = calloc(count, sizeof(*chain)), *bad = NULL;
	int error;

	for (uint32_t i = 0; i < count; ++i) {
		const struct request *r = &requests[i];
		struct ibv_send_wr *wr = &chain[i];

		wr->wr_id = r->id;
		wr->next = i + 1 < count ? wr + 1 : NULL;
		wr->sg_list = (struct ibv_sge *)r->sge;
		wr->num_sge = r->num_sge;
		wr->opcode = r->opcode;
		wr->send_flags = r->flags;
		wr->imm_data = r->imm_be;
		if (r->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || r->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
			wr->wr.atomic.remote_addr = r->remote_addr;
			wr->wr.atomic.rkey = r->rkey;
			wr->wr.atomic.compare_add = r->compare_add;
			wr->wr.atomic.swap = r->swap;
		} else {
			wr->wr.rdma.remote_addr = r->remote_addr;
			wr->wr.rdma.rkey = r->rkey;
		}
	}
	error = mlx5_post_send(&o->qp.verbs_qp.qp, chain, &bad);
	free(chain);
	return error;
}

/* Up to `count` completions. Returns how many; negative: poll_cq did not understand one. */
int oracle_poll(struct oracle *o, struct completion *out, uint32_t count)
{
	struct ibv_wc *found = calloc(count, sizeof(*found));
	int done = mlx5_poll_cq_v1(&o->cq.verbs_cq.cq, count, found);

	for (int i = 0; i < done; ++i) {
		out[i].id = found[i].wr_id;
		out[i].status = found[i].status;
		out[i].vendor_err = found[i].vendor_err;
		out[i].opcode = found[i].opcode;
		out[i].byte_len = found[i].byte_len;
		out[i].imm_be = found[i].imm_data;
		out[i].qpn = found[i].qp_num;
		out[i].flags = found[i].wc_flags;
	}
	free(found);
	return done;
}

static void free_queue(struct mlx5_wq *wq)
{
	free(wq->wrid);
	free(wq->wqe_head);
	free(wq->wr_data);
}

void oracle_close(struct oracle *o)
{
	free(o->context.uidx_table[o->qp.rsc.rsn >> MLX5_UIDX_TABLE_SHIFT].table);
	free_queue(&o->qp.sq);
	free_queue(&o->qp.rq);
	fclose(o->context.dbg_fp);
	free(o);
}
