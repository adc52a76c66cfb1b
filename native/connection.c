/* The node's connection: frames in, answers out, never blocking and never trusting a length. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "spawner.h"

#define RECEIVE_MAX (4 + MAX_FRAME + (64u << 10))
#define BATCHES_MAX 16u
#define READS_PER_TURN 16u
/* Above this the node does not keep up: no further requests until it has read. */
#define UNSENT_MAX (16u << 20)

struct unsent {
	struct unsent *next;
	size_t len;
	size_t sent;
	unsigned descriptors;
	int fds[MAX_DESCRIPTORS];
	uint8_t data[];
};

/* Most pages of these are never touched. */
static uint8_t in[RECEIVE_MAX + 1]; /* one for a terminator */
static uint8_t out[4 + MAX_FRAME];

static struct {
	int fd;
	bool alive;
	bool deaf; /* its peer reads no more; what it has sent still counts */
	bool greeted;
	uint64_t first_request; /* of this peer's */
	struct source source;
	int client; /* pidfd */
	struct source client_source;
	size_t have;
	struct batch batches[BATCHES_MAX]; /* of frames that are not complete yet */
	unsigned batch_count;
	struct builder builder;
	struct unsent *first, **last;
	size_t unsent_bytes;
	bool paused;
} connection = {.fd = -1, .client = -1};

static void arm(void)
{
	uint32_t events = connection.first ? EPOLLOUT : 0u;

	connection.paused = connection.unsent_bytes > UNSENT_MAX;
	if (!connection.paused)
		events |= EPOLLIN;
	loop_add(connection.fd, &connection.source, events);
}

/* Drop what was to be sent. */
static void drop_unsent(void)
{
	while (connection.first) {
		struct unsent *unsent = connection.first;

		connection.first = unsent->next;
		for (unsigned i = 0; i < unsent->descriptors; i++)
			close(unsent->fds[i]);
		free(unsent);
	}
	connection.unsent_bytes = 0;
}

static void lose(void)
{
	if (!connection.alive)
		return;
	connection.alive = false;
	loop_close(&connection.fd);
	loop_close(&connection.client);
	while (connection.batch_count)
		close_batch(&connection.batches[--connection.batch_count]);
	drop_unsent();
}

/* Sending failed. What came before the peer's end is still read, up to that end. */
static void sending_failed(ssize_t error)
{
	if (error != -EPIPE && error != -ECONNRESET) {
		lose();
		return;
	}
	connection.deaf = true;
	drop_unsent();
	arm();
}

void connection_greeted(void)
{
	connection.greeted = true;
}

bool connection_is_greeted(void)
{
	return connection.greeted;
}

bool request_is_current(uint64_t request)
{
	if (!connection.alive || connection.deaf)
		return false;
	return request ? request >= connection.first_request : connection.greeted;
}

bool connection_alive(void)
{
	return connection.alive;
}

static bool copy_descriptors(struct unsent *unsent, const struct builder *b)
{
	for (unsigned i = 0; i < b->descriptors; i++) {
		int copy = dup_cloexec(b->fds[i]);

		if (copy < 0) {
			while (unsent->descriptors)
				close(unsent->fds[--unsent->descriptors]);
			return false;
		}
		unsent->fds[unsent->descriptors++] = copy;
	}
	return true;
}

/* There was no room for its descriptors: that answer is lost, and nothing else. */
static void say_lost(struct unsent *unsent, const struct builder *b)
{
	struct builder lost;

	build_begin(&lost, unsent->data, unsent->len, get_u16(b->buf + 4), get_u64(b->buf + 8));
	build_bytes(&lost, TAG_LOST, NULL, 0);
	build_end(&lost);
	unsent->len = lost.len;
}

/* Keep what the socket did not take, with descriptors of our own. */
static int queue(const struct builder *b, size_t sent)
{
	size_t len = b->len - sent;
	struct unsent *unsent = malloc(sizeof(*unsent) + len);

	if (!unsent)
		return -ENOMEM;
	*unsent = (struct unsent){.len = len};
	memcpy(unsent->data, b->buf + sent, len);
	if (!sent && b->descriptors && !copy_descriptors(unsent, b))
		say_lost(unsent, b);
	if (!connection.first)
		connection.last = &connection.first;
	*connection.last = unsent;
	connection.last = &unsent->next;
	connection.unsent_bytes += unsent->len;
	arm();
	return 0;
}

struct builder *answer_begin(enum type type, uint64_t request)
{
	build_begin(&connection.builder, out, sizeof(out), (uint16_t)type, request);
	return &connection.builder;
}

void answer_send(struct builder *b)
{
	ssize_t sent = 0;

	if (!request_is_current(get_u64(b->buf + 8)))
		return;
	if (build_end(b) < 0) {
		answer_error(get_u64(b->buf + 8), EMSGSIZE, "answer", "it does not fit a frame");
		return;
	}
	if (!connection.first) {
		sent = send_with(connection.fd, b->buf, b->len, b->fds, b->descriptors);
		if (sent < 0 && sent != -EAGAIN) {
			sending_failed(sent);
			return;
		}
		sent = sent < 0 ? 0 : sent;
	}
	if ((size_t)sent < b->len && queue(b, (size_t)sent) < 0)
		lose();
}

struct builder *error_begin(uint64_t request, int error, const char *stage, const char *message)
{
	struct builder *b = answer_begin(TYPE_ERROR, request);

	build_u64(b, TAG_ERRNO, (uint64_t)error);
	build_text(b, TAG_STAGE, stage);
	build_text(b, TAG_MESSAGE, message);
	return b;
}

void answer_error(uint64_t request, int error, const char *stage, const char *message)
{
	answer_send(error_begin(request, error, stage, message));
}

void answer_ok(uint64_t request)
{
	answer_send(answer_begin(TYPE_OK, request));
}

void answer_number(uint64_t request, uint64_t value)
{
	struct builder *b = answer_begin(TYPE_OK, request);

	build_u64(b, TAG_NUMBER, value);
	answer_send(b);
}

static void flush(void)
{
	while (connection.first) {
		struct unsent *unsent = connection.first;
		ssize_t sent = send_with(connection.fd, unsent->data + unsent->sent,
					 unsent->len - unsent->sent, unsent->fds, unsent->descriptors);

		if (sent == -EAGAIN)
			break;
		if (sent < 0) {
			sending_failed(sent);
			return;
		}
		while (unsent->descriptors)
			close(unsent->fds[--unsent->descriptors]);
		unsent->sent += (size_t)sent;
		connection.unsent_bytes -= (size_t)sent;
		if (unsent->sent < unsent->len)
			break;
		connection.first = unsent->next;
		free(unsent);
	}
	arm();
}

/* The descriptors of the frame that comes next. Returns 0, or -EPROTO: they are not as many. */
static int next_batch(unsigned wanted, struct batch *batch)
{
	*batch = (struct batch){.count = 0};
	if (!wanted)
		return 0;
	if (!connection.batch_count)
		return -EPROTO;
	*batch = connection.batches[0];
	connection.batch_count--;
	memmove(connection.batches, connection.batches + 1,
		connection.batch_count * sizeof(*batch));
	if (batch->lost || batch->count == wanted)
		return 0;
	close_batch(batch);
	return -EPROTO;
}

/* Handle the frames that are complete. */
static int handle_frames(void)
{
	size_t at = 0;

	while (connection.alive && !connection.paused) {
		struct frame frame;
		struct batch batch;
		ssize_t len = frame_parse(in + at, connection.have - at, &frame);
		int error;

		if (len < 0)
			return (int)len;
		if (len == 0)
			break;
		error = next_batch(frame.descriptors, &batch);
		if (error)
			return error;
		at += (size_t)len;
		if (!connection.greeted)
			connection.first_request = frame.request;
		if (batch.lost)
			answer_error(frame.request, EMFILE, "descriptors",
				     "the worker has none left");
		else
			error = request_handle(&frame, batch.fds);
		close_batch(&batch);
		if (error)
			return error;
	}
	if (!connection.alive)
		return 0;
	connection.have -= at;
	memmove(in, in + at, connection.have);
	return 0;
}

/*
 * One read brings the descriptors of one frame at most: the last that begins in it. Returns whether
 * more may be waiting, or -errno.
 */
static int receive(void)
{
	struct batch batch;
	ssize_t got = receive_with(connection.fd, in + connection.have,
				   RECEIVE_MAX - connection.have, MSG_DONTWAIT, &batch);

	if (got <= 0)
		return got ? (int)got : -ECONNRESET;
	connection.have += (size_t)got;
	if (!batch.lost && !batch.count)
		return connection.have == RECEIVE_MAX;
	if (connection.batch_count == BATCHES_MAX) {
		close_batch(&batch);
		return -EPROTO;
	}
	connection.batches[connection.batch_count++] = batch;
	return 1;
}

static void ready(struct source *, uint32_t events)
{
	if (connection.alive && events & EPOLLOUT) {
		bool paused = connection.paused;

		flush();
		if (paused && !connection.paused && handle_frames() < 0)
			lose();
	}
	for (unsigned i = 0; i < READS_PER_TURN && connection.alive && !connection.paused; i++) {
		int more = events & (EPOLLIN | EPOLLHUP | EPOLLERR) ? receive() : -EAGAIN;

		if (more == -EAGAIN)
			return;
		if (more < 0 || handle_frames() < 0) {
			lose();
			return;
		}
		if (!more)
			return;
	}
	if (connection.alive && connection.paused && events & (EPOLLHUP | EPOLLERR))
		lose();
}

void connection_open(int fd)
{
	connection.fd = fd;
	connection.alive = true;
	connection.deaf = connection.greeted = connection.paused = false;
	connection.first_request = UINT64_MAX;
	connection.have = 0;
	connection.source.ready = ready;
	arm();
}

static void client_ended(struct source *, uint32_t)
{
	/* Nothing is sent any more; what was is acted upon before the connection goes. */
	connection.deaf = true;
	drop_unsent();
	arm();
	while (connection.alive)
		if (receive() < 0 || handle_frames() < 0)
			break;
	lose();
}

int connection_watch(int pidfd)
{
	connection.client = pidfd;
	connection.client_source.ready = client_ended;
	return loop_add(pidfd, &connection.client_source, EPOLLIN);
}
