/* The first request of a connection: a worker is told what it works for, or taken over. */
#define _GNU_SOURCE
#include <unistd.h>

#include "request.h"

/* From here on what it works for is this daemon's. */
static int welcome(struct request *r, int client)
{
	struct builder *b;

	r->stage = "client";
	if (client >= 0)
		TRY(connection_watch(keep_fd(r, client)));
	connection_greeted();
	b = answer_begin(TYPE_OK, r->frame->request);
	build_u64(b, TAG_VERSION, PROTOCOL_VERSION);
	build_u64(b, TAG_NUMBER, (uint64_t)getpid());
	answer_send(b);
	return 0;
}

int handle_hello(struct request *r)
{
	const char *groups[CONTROLLERS + 1];
	size_t group_count = 0;
	uint64_t version = 0, grace = 0;
	int layers = -1, spool = -1, program = -1, client = -1, listener = -1;

	TRY(TAKE(r, NUMBERS(TAG_VERSION, &version, 1), DESCRIPTOR(TAG_LAYERS_FD, &layers),
		 DESCRIPTOR(TAG_SPOOL_FD, &spool),
		 DESCRIPTOR(TAG_SELF_FD, &program), DESCRIPTOR(TAG_CLIENT_FD, &client),
		 DESCRIPTOR(TAG_LISTEN_FD, &listener), NUMBERS(TAG_GRACE, &grace, 1),
		 TEXTS(TAG_CGROUP, groups, &group_count)));
	if (version != PROTOCOL_VERSION)
		return refuse(r, EPROTO, "another version of the protocol");
	if (worker.greeted)
		return refuse(r, EPROTO, "a second HELLO");
	if (layers < 0 || spool < 0 || program < 0)
		return refuse(r, EPROTO, "a descriptor is missing");
	r->stage = "cgroups";
	for (size_t i = 0; i < group_count; i++)
		TRY(cgroups_use(groups[i]));
	TRY(cgroups_finish());
	r->stage = "mount namespace";
	TRY(rootfs_prepare(layers));
	/* Until then nothing outlives the connection. */
	r->stage = "listen";
	if (listener >= 0)
		TRY(attach_listen(keep_fd(r, listener), grace));
	worker.spool = keep_fd(r, spool);
	worker.program = keep_fd(r, program);
	TRY(welcome(r, client));
	worker.greeted = true;
	inotify_prepare();
	return 0;
}

int handle_attach(struct request *r)
{
	int client = -1;

	TRY(TAKE(r, DESCRIPTOR(TAG_CLIENT_FD, &client)));
	if (!worker.greeted || connection_is_greeted() || worker.ending)
		return refuse(r, EPROTO, "there is nothing to take over");
	TRY(welcome(r, client));
	attach_done();
	return 0;
}
