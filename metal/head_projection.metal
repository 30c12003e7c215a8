// Heads of attention with their norm and rope, from normed rows. For committed positions
// (DFlashDrafter.observe, after fuse_taps.metal): keys and values of all draft layers. For a block
// (DraftAttention): queries, keys and values of one layer. One threadgroup makes one head, since its
// norm needs the whole of it: heads 0 .. QUERIES - 1 are queries, then HEADS keys, then HEADS values.
//
// The norm of the rows is folded in: its weights go with the columns, 1 / rms of a row with the row's
// sums; the squares it needs are `squares` [parts, rows] (WEIGHTED) or made here (SQUARED).
// Queries and keys get their norm and rope (halves of the first 2 * HALF dimensions) at absolute
// positions.

constexpr int SIMDS = D / (8 * TILES);
threadgroup float head_rows[ROW_TILES * 8][D];
threadgroup float scale_of[ROW_TILES * 8];
const int rows = x_shape[0], columns = x_shape[1];
const int head = int(threadgroup_position_in_grid.x), key = head - QUERIES, value = key - HEADS;
const int lane = int(thread_index_in_simdgroup), simd = int(simdgroup_index_in_threadgroup);

Inputs<X, 1> inputs;
inputs.width = columns;
inputs.parts[0] = x;
Tile<W, S> tiles[TILES];
for (int t = 0; t < TILES; t++) {
    if (key < 0) tiles[t] = {q_weights, q_scales, q_biases, head * D, 0};
    else if (value < 0) tiles[t] = {k_weights, k_scales, k_biases, key * D, 0};
    else tiles[t] = {v_weights, v_scales, v_biases, value * D, 0};
    tiles[t].end = tiles[t].first + D;
    tiles[t].first += (simd * TILES + t) * 8;
}

simdgroup_float8x8 sums[ROW_TILES][TILES];
float square_sums[ROW_TILES];
multiply_rows<X, W, S, C, BITS, GROUP, 1, ROW_TILES, TILES, NORM>(
    inputs, rows, tiles, columns, 0, 1, norm, uint(lane), sums, square_sums);
store_products<ROW_TILES, TILES>(sums, &head_rows[0][simd * TILES * 8], D, uint(lane));
if (NORM == SQUARED && simd == 0 && matrix_column(uint(lane)) == 0)
    for (int r = 0; r < ROW_TILES; r++)
        scale_of[8 * r + matrix_row(uint(lane))] = rsqrt(square_sums[r] / float(columns) + norm_eps);
if (NORM == WEIGHTED) {
    for (int m = simd; m < rows; m += SIMDS) {
        float sum = 0;
        for (int i = lane; i < squares_shape[0]; i += 32) sum += squares[i * rows + m];
        sum = simd_sum(sum);
        if (lane == 0) scale_of[m] = rsqrt(sum / float(columns) + norm_eps);
    }
}
threadgroup_barrier(mem_flags::mem_threadgroup);

for (int m = simd; m < rows; m += SIMDS) {
    float sum = 0;
    for (int d = lane; d < D; d += 32) {
        float number = head_rows[m][d];
        if (NORM != PLAIN) number *= scale_of[m];
        if (BIAS) {
            if (key < 0) number += float(q_bias[head * D + d]);
            else if (value < 0) number += float(k_bias[key * D + d]);
            else number += float(v_bias[value * D + d]);
        }
        head_rows[m][d] = number;
        sum += number * number;
    }
    device T* to = out + (size_t(head) * rows + m) * D;
    if (value >= 0) {
        for (int d = lane; d < D; d += 32) to[d] = T(head_rows[m][d]);
        continue;
    }
    const float scale = rsqrt(simd_sum(sum) / float(D) + head_eps);
    device const T* head_norm = key < 0 ? query_norm : key_norms + key / KV_HEADS * D;
    for (int d = lane; d < D; d += 32) head_rows[m][d] *= scale * float(head_norm[d]);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int d = lane; d < D; d += 32) {
        float turned = head_rows[m][d];
        if (d < 2 * HALF) {
            const int pair = d % HALF;
            const float turn = THETA ? exp2(-log_theta * float(pair) / float(HALF)) : 1.0f / periods[pair];
            const float angle = float(position + m) * turn;
            const float other = head_rows[m][d < HALF ? d + HALF : d - HALF];
            turned = magnitude * (turned * cos(angle) + (d < HALF ? -other : other) * sin(angle));
        }
        to[d] = T(turned);
    }
}
