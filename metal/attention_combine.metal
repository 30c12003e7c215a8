// The second launch of block_attention: puts the splits of a query row together, in their order. One
// simdgroup a row; a row of `partial` holds weighted values, their maximum and their sum. A split
// without a key that the query sees changes no bit.

const int splits = partial_shape[0], group_rows = partial_shape[2], rows = group_rows / GROUP;
const int lane = int(thread_index_in_simdgroup), query = int(thread_position_in_grid.y);
const int kv = query / group_rows, row = query % group_rows;
const int head = kv * GROUP + row / rows;
const size_t stride = size_t(KV_HEADS) * group_rows * (D + 2);
device const float* first = partial + size_t(query) * (D + 2);

float highest = -INFINITY, weight = 0, kept = 1;
for (int s = 0; s < splits; s++) highest = max(highest, first[s * stride + D]);
float sums[(D + 31) / 32];
for (int d = 0; d < (D + 31) / 32; d++) sums[d] = 0;
for (int s = 0; s < splits; s++) {
    device const float* from = first + s * stride;
    const float share = exp(from[D] - highest);
    weight += from[D + 1] * share;
    for (int d = lane; d < D; d += 32) sums[d / 32] += from[d] * share;
}
if (SINKS) add_sink(float(sinks[head]), highest, weight, kept);
device T* to = out + (size_t(row % rows) * KV_HEADS * GROUP + head) * D;
for (int d = lane; d < D; d += 32) to[d] = T(sums[d / 32] * kept / weight);
