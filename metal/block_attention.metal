// Attention of a block's rows to the context and to the block itself: the drafter's layers, and the
// target's in verification. The context is split; each split leaves its maximum, its sum and its
// weighted values (PARTIAL), which attention_combine.metal puts together; a single split finishes here.
//
// A threadgroup takes one split of one key/value head and up to 64 of its query rows (all query heads
// of the group), eight rows a simdgroup. Tiles of TILE keys, then of values, go through threadgroup
// memory, shared by all. Tiles and splits begin at absolute positions (`origin` is that of the first
// context row), and a key that a row may not see changes no bit of the row's sums: a row's result
// depends on its own position only, not on the rows beside it or on how the context is held.

threadgroup T tile[TILE * D];
const int rows = queries_shape[2], total = CONTEXT ? keys_shape[2] + rows : rows;
const int context = total - rows, group_rows = GROUP * rows;
const int lane = int(thread_index_in_simdgroup), simd = int(simdgroup_index_in_threadgroup);
const int split = int(threadgroup_position_in_grid.x), kv = int(threadgroup_position_in_grid.y);
const int threads = int(threads_per_threadgroup.x);
const int base = (int(threadgroup_position_in_grid.z) * threads / 32 + simd) * 8;
const int row = base + matrix_row(uint(lane)), column = matrix_column(uint(lane));
const bool real = row < group_rows, busy = base < group_rows;
const int head = kv * GROUP + (real ? row / rows : 0), at = context + (real ? row % rows : 0);

simdgroup_float8x8 query[D / 8], sums[D / 8];
for (int d = 0; d < D / 8; d++) {
    sums[d] = make_filled_simdgroup_matrix<float, 8>(0.0f);
    for (int e = 0; e < 2; e++) {
        const size_t place = head * queries_strides[1] + (at - context) * queries_strides[2] +
                             (8 * d + column + e) * queries_strides[3];
        query[d].thread_elements()[e] = real ? float(queries[place]) : 0.0f;
    }
}

simdgroup_float8x8 scores[TILE / 8];
float highest = -INFINITY, weight = 0;
const int split_begin = (origin / split_keys + split) * split_keys - origin;
int begin = max(split_begin, WINDOW ? max(0, context - WINDOW + 1) : 0);
// Rounded down to a tile; positions are absolute, hence the origin.
begin = (begin + origin) / TILE * TILE - origin;
const int end = min(split_begin + split_keys, total);
for (int start = max(begin, split_begin); start < end; start += TILE) {
    for (int pass = 0; pass < 2; pass++) {  // keys, then values
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int i = int(thread_index_in_threadgroup); i < TILE * D / 4; i += threads) {
            const int j = start + i / (D / 4), d = i % (D / 4) * 4;
            vec<T, 4> four = vec<T, 4>(T(0));
            if (j >= 0 && j < context) {
                device const T* from = pass ? values + kv * values_strides[1] + j * values_strides[2]
                                            : keys + kv * keys_strides[1] + j * keys_strides[2];
                four = *(device const vec<T, 4>*)(from + d);
            } else if (j >= context && j < total) {
                const int b = j - context;
                device const T* from =
                    pass ? block_values + kv * block_values_strides[1] + b * block_values_strides[2]
                         : block_keys + kv * block_keys_strides[1] + b * block_keys_strides[2];
                four = *(device const vec<T, 4>*)(from + d);
            }
            *(threadgroup vec<T, 4>*)(tile + i * 4) = four;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (!busy) continue;
        if (pass == 0) {
            for (int n = 0; n < TILE / 8; n++) {
                scores[n] = make_filled_simdgroup_matrix<float, 8>(0.0f);
                for (int d = 0; d < D / 8; d++) {
                    simdgroup_float8x8 key;
                    for (int e = 0; e < 2; e++)
                        key.thread_elements()[e] =
                            float(tile[(8 * n + column + e) * D + 8 * d + matrix_row(uint(lane))]);
                    simdgroup_multiply_accumulate(scores[n], query[d], key, scores[n]);
                }
            }
            float highest_here = highest;
            for (int n = 0; n < TILE / 8; n++) {
                for (int e = 0; e < 2; e++) {
                    const int j = start + 8 * n + column + e;
                    const bool seen = real && j >= 0 && j < total && (!CAUSAL || j <= at) &&
                                      (!WINDOW || (at - j < WINDOW && j - at < WINDOW));
                    const float score = seen ? scores[n].thread_elements()[e] * scale : -INFINITY;
                    scores[n].thread_elements()[e] = score;
                    highest_here = max(highest_here, score);
                }
            }
            highest_here = row_max(highest_here);
            const float kept = highest == -INFINITY ? 0.0f : exp(highest - highest_here);
            float sum = 0;
            for (int n = 0; n < TILE / 8; n++) {
                for (int e = 0; e < 2; e++) {
                    const float score = scores[n].thread_elements()[e];
                    const float share = score == -INFINITY ? 0.0f : exp(score - highest_here);
                    scores[n].thread_elements()[e] = share;
                    sum += share;
                }
            }
            weight = weight * kept + row_sum(sum);
            highest = highest_here;
            for (int d = 0; d < D / 8; d++)
                for (int e = 0; e < 2; e++) sums[d].thread_elements()[e] *= kept;
        } else {
            for (int n = 0; n < TILE / 8; n++) {
                for (int d = 0; d < D / 8; d++) {
                    simdgroup_float8x8 value;
                    for (int e = 0; e < 2; e++)
                        value.thread_elements()[e] =
                            float(tile[(8 * n + matrix_row(uint(lane))) * D + 8 * d + column + e]);
                    simdgroup_multiply_accumulate(sums[d], scores[n], value, sums[d]);
                }
            }
        }
    }
}
if (!real) return;

if (PARTIAL) {
    const size_t place = (size_t(split) * KV_HEADS + kv) * group_rows + row;
    device O* to = out + place * (D + 2);
    for (int d = 0; d < D / 8; d++)
        for (int e = 0; e < 2; e++) to[8 * d + column + e] = O(sums[d].thread_elements()[e]);
    if (column == 0) {
        to[D] = O(highest);
        to[D + 1] = O(weight);
    }
} else {
    float kept = 1;
    if (SINKS) add_sink(float(sinks[head]), highest, weight, kept);
    const size_t place = (size_t(at - context) * KV_HEADS * GROUP + head) * D;
    for (int d = 0; d < D / 8; d++)
        for (int e = 0; e < 2; e++)
            out[place + 8 * d + column + e] = O(sums[d].thread_elements()[e] * kept / weight);
}
