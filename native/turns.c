/*
 * Whose output is read next. Streams that have something stand in a lane of their sandbox, the lanes in
 * a ring; each turn of the loop reads a little and then looks for requests and reports again. A
 * sandbox that floods its pipes so waits for itself, not its neighbours for it. What has written much
 * has a lane apart, and while others start commands only a share of the time: what writes without
 * end takes the processors that they need, and it is the reading that lets it.
 */
#define _GNU_SOURCE

#include "spawner.h"

/* So much is read in one turn of the loop before it looks for requests again. */
#define TURN_BYTES (64u << 10)
#define TURN_READS 16u
/*
 * Once the result is delivered, what its leftovers write is nobody's work any more: all of a sandbox
 * together are read at this rate, and wait for it as for any slow reader.
 */
#define LEFTOVER_RATE (2u << 20) /* bytes per second */
#define LEFTOVER_BURST (2u << 20)

/* So long a new stream is not watched: most commands end before, and are read from then. */
#define UNWATCHED_NS (4 * NS_PER_MS)

/* From so much on a stream is one of many bytes. */
#define BULK_BYTES (1u << 20)
/*
 * While others start commands, each read of those is followed by a pause, so much as long as it
 * took. They do until they have not for a while: what they started is to be answered, too.
 */
#define BULK_PAUSE 19u
#define BULK_PAUSE_MAX_NS (10 * NS_PER_MS)
#define STARTING_NS NS_PER_S

static struct link lanes = RING(lanes);
static struct link bulk_lanes = RING(bulk_lanes);
static struct timer bulk_pause;
static struct lane unwatched = {.streams = RING(unwatched.streams)};

void turns_leave(struct stream *stream)
{
	struct lane *lane = stream->lane;

	if (!lane)
		return;
	unlink_one(&stream->link);
	stream->lane = NULL;
	if (ring_is_empty(&lane->streams)) {
		unlink_one(&lane->link);
		timer_cancel(&lane->timer);
	}
}

static void watch_all(struct timer *)
{
	while (!ring_is_empty(&unwatched.streams)) {
		struct stream *stream = container_of(unwatched.streams.next, struct stream, link);

		turns_leave(stream);
		stream_watch(stream);
	}
}

void turns_begin(struct stream *stream)
{
	link_last(&unwatched.streams, &stream->link);
	stream->lane = &unwatched;
	if (unwatched.timer.index)
		return;
	unwatched.timer.fire = watch_all;
	timer_in(&unwatched.timer, UNWATCHED_NS);
}

static struct lane *lane_of(const struct stream *stream)
{
	struct sandbox *sandbox = stream->exec->sandbox;

	if (stream->exec->ended)
		return &sandbox->leftover;
	return stream->total < BULK_BYTES ? &sandbox->running : &sandbox->bulk;
}

void turns_join(struct stream *stream)
{
	struct lane *lane = lane_of(stream);

	turns_leave(stream);
	link_last(&lane->streams, &stream->link);
	stream->lane = lane;
	if (!lane->link.next && !lane->timer.index)
		link_last(lane == &stream->exec->sandbox->bulk ? &bulk_lanes : &lanes, &lane->link);
}

static void wait_over(struct timer *timer)
{
	struct lane *lane = container_of(timer, struct lane, timer);

	link_last(&lanes, &lane->link);
}

/* How much may be read of leftovers now; if it is not worth a read, their lane has to wait. */
static size_t allowance(struct lane *lane)
{
	uint64_t now = now_ns();
	uint64_t passed = now - lane->counted_ns;

	if (!lane->counted_ns || passed > NS_PER_S)
		lane->tokens = LEFTOVER_BURST;
	else
		lane->tokens += passed * LEFTOVER_RATE / NS_PER_S;
	lane->counted_ns = now;
	if (lane->tokens > LEFTOVER_BURST)
		lane->tokens = LEFTOVER_BURST;
	if (lane->tokens >= STREAM_READ_MAX)
		return STREAM_READ_MAX;
	unlink_one(&lane->link);
	lane->timer.fire = wait_over;
	timer_set(&lane->timer, now + (STREAM_READ_MAX - lane->tokens) * NS_PER_S / LEFTOVER_RATE);
	return 0;
}

/* One read of the stream whose turn it is. Returns how much that was. */
static size_t serve(struct lane *lane)
{
	struct stream *stream = container_of(lane->streams.next, struct stream, link);
	struct sandbox *sandbox = stream->exec->sandbox;
	size_t most = STREAM_READ_MAX, got;

	/* Its exec may have ended since it was put in line. */
	if (lane != lane_of(stream)) {
		turns_join(stream);
		return 0;
	}
	if (lane == &sandbox->leftover)
		most = allowance(lane);
	if (!most)
		return 0;
	got = stream_read(stream, most);
	if (lane == &sandbox->leftover)
		lane->tokens -= got;
	if (!got && !stream->eof) {
		turns_leave(stream);
		stream_await(stream);
	} else if (got) {
		turns_join(stream);
	}
	exec_progress(stream->exec);
	return got;
}

static size_t serve_next(struct link *ring)
{
	struct lane *lane = container_of(ring->next, struct lane, link);

	unlink_one(&lane->link);
	link_last(ring, &lane->link);
	return serve(lane);
}

static void look_again(struct timer *)
{
}

static void run_bulk(void)
{
	struct lane *lane = container_of(bulk_lanes.next, struct lane, link);
	struct stream *stream = container_of(lane->streams.next, struct stream, link);
	bool own = stream->exec->began_ns == worker.started_ns;
	uint64_t began = now_ns();
	uint64_t took, pause;

	serve_next(&bulk_lanes);
	took = now_ns() - began;
	if (own || began + took - worker.started_ns > STARTING_NS)
		return;
	pause = BULK_PAUSE * took;
	bulk_pause.fire = look_again;
	timer_set(&bulk_pause,
		  began + took + (pause < BULK_PAUSE_MAX_NS ? pause : BULK_PAUSE_MAX_NS));
}

static bool bulk_due(void)
{
	return !ring_is_empty(&bulk_lanes) && !bulk_pause.index;
}

bool turns_due(void)
{
	return !ring_is_empty(&lanes) || bulk_due();
}

void turns_run(void)
{
	size_t bytes = 0;

	for (unsigned i = 0; i < TURN_READS && bytes < TURN_BYTES && !ring_is_empty(&lanes); i++)
		bytes += serve_next(&lanes);
	if (bulk_due())
		run_bulk();
}
